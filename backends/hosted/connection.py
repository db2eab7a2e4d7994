"""One HTTP/1.1 connection: a request out, its answer in as it arrives (RFC 9112). Parsed by llhttp (httptools).

Written for what a gateway does all day, where a general client's objects for each request, header and chunk cost many
times what the relaying does (benchmarks/gateway.py).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from typing import cast

import httptools

_MAX_HEADER_BYTES = 64 << 10
_HIGH_WATER = 256 << 10
"""Bytes of a body that nobody has taken, from which on nothing more is read: a slow client does not fill memory."""


class Broken(Exception):
    """The connection ended, or what came is not HTTP. `untouched`: before a single byte of an answer."""

    def __init__(self, reason: str, *, untouched: bool = False) -> None:
        super().__init__(reason)
        self.untouched = untouched


class Connection(asyncio.Protocol):
    """Carries one exchange at a time: `send`, then `chunks` to the end, and it is `reusable`."""

    def __init__(self, lost: Callable[[Connection], None]) -> None:
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._broken: Broken | None = None
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._header_bytes = 0
        self._head = self._complete = self._keep_alive = self._touched = False
        self._parts: list[bytes] = []
        self._waiting = 0
        """Bytes in `_parts`."""
        self._paused = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether the answer is complete and the server keeps the connection."""
        return self._complete and self._keep_alive and not self._parts and self.alive

    @property
    def alive(self) -> bool:
        return self._broken is None and self._transport is not None and not self._transport.is_closing()

    # --- our side ------------------------------------------------------------------------------------

    async def send(self, request: bytes) -> None:
        """Write a whole request and wait for the head of its answer. Raises Broken."""
        assert self._transport is not None
        self._begin()
        self._transport.write(request)
        while not self._head:
            await self._news()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises Broken where it is cut."""
        while True:
            if self._parts:
                parts, self._parts, self._waiting = self._parts, [], 0
                if self._paused and self._transport is not None:
                    self._paused = False
                    self._transport.resume_reading()
                yield parts[0] if len(parts) == 1 else b"".join(parts)
            elif self._complete:
                return
            else:
                await self._news()

    def close(self) -> None:
        """Drop it; what the server is still doing for us it may stop."""
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None
        if self._broken is not None and not (self._parts or self._complete):
            raise self._broken

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- asyncio's -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        if self._complete:  # nobody asked for this
            self.close()
            return
        self._touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"not HTTP: {error}")
            self.close()
        self._notify()

    def eof_received(self) -> None:
        """The transport closes itself then."""

    def connection_lost(self, exc: Exception | None) -> None:
        # A body without a length ends where the connection does.
        if self._head and not self._complete and exc is None and self._until_close():
            self._complete = True
        if self._broken is None:
            reason = "the server closed the connection" if exc is None else reason_of(exc)
            self._break(reason, untouched=not self._touched)
        self._notify()
        self._lost(self)

    def _until_close(self) -> bool:
        return "content-length" not in self.headers and "chunked" not in self.headers.get("transfer-encoding", "")

    def _break(self, reason: str, *, untouched: bool = False) -> None:
        self._broken = self._broken or Broken(reason, untouched=untouched)

    # --- llhttp's ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"headers of more than {_MAX_HEADER_BYTES >> 10} KiB")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self.headers.get(key)
        self.headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers = {}
            return
        self._head = True
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._complete = self._head


def reason_of(error: BaseException) -> str:
    """Why a connection could not be had or was lost, in the system's words: the event loop's own repeat the address and
    leave the reason out."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS failed"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
