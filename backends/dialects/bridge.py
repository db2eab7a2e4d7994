"""A call to a backend, whatever either of them speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from backends.base import Backend, Call, KVTransfer, Piece, PromptCount, Reply, Surface
from backends.dialects import chat_to_messages, messages_to_chat
from backends.dialects.translation import Answering, Translator, cannot

_PAIRS: dict[tuple[Surface, Surface], Translator] = {
    ("messages", "chat.completions"): messages_to_chat.TRANSLATOR,
    ("chat.completions", "messages"): chat_to_messages.TRANSLATOR,
}


def _translator(backend: Backend, surface: Surface) -> tuple[Surface, Translator] | None:
    """What the backend speaks instead, and the way there; None where there is none."""
    return next(
        (
            (other, translator)
            for (client, other), translator in _PAIRS.items()
            if client == surface and other in backend.surfaces
        ),
        None,
    )


async def open_call(backend: Backend, call: Call) -> Reply:
    """`backend.open`, translated both ways where that is needed. Raises BackendError."""
    if call.surface in backend.surfaces:
        return await backend.open(call)
    found = _translator(backend, call.surface)
    if found is None:
        raise cannot("the request", f"it serves {', '.join(sorted(backend.surfaces))}, not {call.surface}")
    surface, translator = found
    body = translator.request(call.body)
    reply = await backend.open(replace(call, surface=surface, body=body, raw=None))
    return _Translated(reply, translator.answering(call.body), call.stream)


def count(backend: Backend, surface: Surface, body: Mapping[str, Any]) -> PromptCount | None:
    """`backend.count_prompt`, of what the prompt is translated to. Raises BackendError."""
    if surface in backend.surfaces:
        return backend.count_prompt(surface, body)
    found = _translator(backend, surface)
    if found is None:
        return None
    other, translator = found
    return backend.count_prompt(other, translator.request(body))


class _Translated:
    """A reply in the client's words."""

    def __init__(self, reply: Reply, answering: Answering, stream: bool) -> None:
        self._reply = reply
        self._answering = answering
        self._stream = stream
        self.status = reply.status
        self.headers = reply.headers

    @property
    def transfer(self) -> KVTransfer | None:
        return self._reply.transfer

    @property
    def placement(self) -> str | None:
        return self._reply.placement

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for piece in self._reply:
            data = self._answering.events(piece) if self._stream else self._answering.whole(piece)
            if data or piece.content or piece.done:
                yield replace(piece, data=data)

    async def aclose(self) -> None:
        await self._reply.aclose()
