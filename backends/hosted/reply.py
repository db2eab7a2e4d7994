"""An answer of a hosted API under way, relayed byte for byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from backends.base import BackendError, KVTransfer, Piece, Usage
from backends.hosted.http import Response
from backends.hosted.refusals import in_band
from backends.hosted.sse import Event, EventTooLarge, Splitter

if TYPE_CHECKING:
    from backends.hosted.provider import Provider

_MAX_ANSWER_BYTES = 64 << 20


class HostedReply:
    """What events and bodies mean, the subclass of each dialect knows."""

    hint = ""
    """What to look at where the answer is something else altogether."""

    def __init__(self, provider: Provider, response: Response, *, stream: bool) -> None:
        self.status = response.status
        self.headers = response.headers
        self.usage: Usage | None = None
        self.provider = provider
        self._response = response
        self._stream = stream

    def is_end(self, event: Event) -> bool:
        """Whether the stream is complete with `event`."""
        raise NotImplementedError

    def read(self, event: Event) -> tuple[bytes, bool, BackendError | None]:
        """(bytes to relay, whether a client sees content in them, the error that the event is)."""
        raise NotImplementedError

    def usage_of(self, body: Mapping[str, Any]) -> Usage | None:
        """Of a whole answer."""
        raise NotImplementedError

    @property
    def placement(self) -> None:
        return None

    @property
    def transfer(self) -> KVTransfer | None:
        return None

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        pieces = self._events() if self._stream else self._whole()
        try:
            async for piece in pieces:
                yield piece
        except BackendError as error:
            raise self.provider.noted(error) from None

    # --- whole ---------------------------------------------------------------------------------------

    async def _whole(self) -> AsyncIterator[Piece]:
        data = await self._response.read(_MAX_ANSWER_BYTES)
        body = parsed(data)
        if body is None:
            raise self._not_what_was_asked("JSON", data)
        if body.get("error"):
            raise in_band(self.provider.name, body["error"])
        yield Piece(data, content=True, usage=self.usage_of(body), done=True)

    def _not_what_was_asked(self, wanted: str, data: bytes) -> BackendError:
        kind = self.headers.get("content-type", "of no content type")
        begin = data[:80].decode("utf-8", "replace")
        return BackendError(
            f"{self.provider.name}: {wanted} was expected, the answer is {kind}: {begin!r}",
            status=502,
            code="not_the_api",
            hint=self.hint,
        )

    # --- streamed ------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[Piece]:
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            data = await self._response.read(_MAX_ANSWER_BYTES)
            said = parsed(data)
            if said is not None and said.get("error"):
                raise in_band(self.provider.name, said["error"])
            raise self._not_what_was_asked("a stream of events", data)
        splitter = Splitter()
        try:
            async for chunk in self._response.chunks():
                piece, error = self._piece(splitter, chunk)
                if piece is not None:
                    yield piece
                if error is not None:
                    raise error
                if piece is not None and piece.done:
                    return
        except EventTooLarge:
            raise BackendError(f"{self.provider.name}: an event of the stream never ends", status=502) from None
        # Without its proper end it is a part of an answer, however tidily the connection closed (Portkey#1797).
        raise BackendError(
            f"{self.provider.name}: the stream ended before the answer was complete", status=502, code="stream_cut"
        )

    def _piece(self, splitter: Splitter, chunk: bytes) -> tuple[Piece | None, BackendError | None]:
        """What `chunk` completes: events to relay, and the error that ends them, if one does."""
        data = b""
        content = False
        for event in splitter.feed(chunk):
            if self.is_end(event):
                return Piece(data + event.raw, content, self.usage, done=True), None
            kept, shows, error = self.read(event)
            if error is not None:
                return (Piece(data, content) if data else None), error
            data += kept
            content = content or shows
        return (Piece(data, content) if data else None), None

    def not_json(self) -> BackendError:
        return BackendError(f"{self.provider.name}: an event of the stream is not JSON", status=502)


def parsed(data: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
