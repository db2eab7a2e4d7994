"""The response to a streamed request, as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream
]
_COMMENT = b": keep-alive\n\n"


class EventStream:
    """One response. While there is nothing to send, comments say that it is still coming: proxies between, and clients
    with timers of their own, give up on a connection that is silent for long (litellm#34374). Always `close()`.

    The first comment begins the response with status 200, so a failure after it is an event.
    """

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]], quiet_s: float) -> None:
        """`headers`: those of a response that a comment begins. A comment comes after every `quiet_s` seconds without
        anything else."""
        self.begun = False
        self._send = send
        self._headers = headers
        self._quiet_s = quiet_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer = self._loop.call_at(self._last_s + quiet_s, self._check)
        self._commenting: asyncio.Task[None] | None = None

    async def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Where no comment has done so."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, *_HEADERS]})

    async def send(self, data: bytes) -> None:
        """Whole events; comments go between them."""
        self._last_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.close()
        await self._send({"type": "http.response.body", "body": b""})

    def close(self) -> None:
        """No more comments."""
        self._timer.cancel()
        if self._commenting is not None:
            self._commenting.cancel()

    def _check(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._last_s + self._quiet_s:
            self._last_s = now_s
            if self._commenting is None or self._commenting.done():  # else the client does not read
                self._commenting = self._loop.create_task(self._comment())
        self._timer = self._loop.call_at(self._last_s + self._quiet_s, self._check)

    async def _comment(self) -> None:
        await self.begin(self._headers)
        await self.send(_COMMENT)
