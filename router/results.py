"""What a caller of the SDK gets: typed results, with the facts of routing beside the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from backends.base import KVTransfer, Piece, Surface, Usage, read_usage

if TYPE_CHECKING:
    from policies import Decision
    from router.answer import Answer


AttemptKind = Literal["first", "retry", "fallback", "hedge", "continue"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at one target. `status` is HTTP's (499: given up, because another was faster); `error` says why it
    failed, None where it did not."""

    target: str
    status: int
    seconds: float
    """To its first content, or to its failure."""
    error: str | None = None
    kind: AttemptKind = "first"
    """Why it was made."""
    ttft_s: float | None = None
    """None where no content came."""
    usage: Usage | None = None
    cost_usd: float | None = None
    """By the target's price; None where that or the tokens are not known. The client is billed for its answer alone."""


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. Times in milliseconds, from the call of the SDK."""

    text: str
    finish_reason: str | None
    usage: Usage
    target: str
    decision: Decision
    attempts: tuple[Attempt, ...]
    request_id: str
    total_ms: float
    cost_usd: float | None
    """By the target's price in the policy; None where that has none."""
    transfer: KVTransfer | None
    """The KV hand-over from prefill to decode; None where there was none."""
    raw: Mapping[str, Any] = field(repr=False)
    """The provider's whole answer: tool calls, further choices, what else it sent."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream. `text` is None in events without any (role, usage)."""

    text: str | None
    finish_reason: str | None
    usage: Usage | None
    raw: Mapping[str, Any] = field(repr=False)


class ChatStream:
    """An answer as it is generated: iterate for `StreamEvent`s, to the end or `aclose()` (or `async with`) before.

    Nothing is sent before the first `__anext__` or `started()`. The facts of routing are None until then.
    Raises RouterError, also in the middle: an answer that was cut never looks complete.
    """

    def __init__(self, opening: Any, surface: Surface) -> None:
        self._opening = opening
        self._surface = surface
        self._answer: Answer | None = None
        self._events: AsyncIterator[StreamEvent] | None = None

    async def started(self) -> Answer:
        """Wait until the first content is there; which target gave it stands in the returned answer."""
        if self._answer is None:
            self._answer = await self._opening()
        return self._answer

    @property
    def target(self) -> str | None:
        return None if self._answer is None else self._answer.target

    @property
    def decision(self) -> Decision | None:
        return None if self._answer is None else self._answer.decision

    @property
    def transfer(self) -> KVTransfer | None:
        return None if self._answer is None else self._answer.transfer

    @property
    def usage(self) -> Usage | None:
        """Known when the stream has ended."""
        return None if self._answer is None else self._answer.usage

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._events is None:
            self._events = self._read(await self.started())
        return await anext(self._events)

    async def _read(self, answer: Answer) -> AsyncIterator[StreamEvent]:
        try:
            async for piece in answer:
                for event in events_of(piece, self._surface):
                    yield event
        finally:
            await answer.aclose()

    async def aclose(self) -> None:
        """Stop, and cancel what is still being generated."""
        if self._answer is not None:
            await self._answer.aclose()

    async def __aenter__(self) -> ChatStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def events_of(piece: Piece, surface: Surface) -> list[StreamEvent]:
    """The events in `piece`, `[DONE]` and comments left out."""
    events = []
    for line in piece.data.splitlines():
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            continue
        chunk = json.loads(payload)
        choice = (chunk.get("choices") or [{}])[0]
        text = choice.get("text") if surface == "completions" else (choice.get("delta") or {}).get("content")
        events.append(StreamEvent(text or None, choice.get("finish_reason"), read_usage(chunk), chunk))
    return events
