"""Runs the gateway's application on a socket that is already bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

T = TypeVar("T")

STOP_GRACE_S = 10
"""How long Ctrl-C waits for answers under way; a second one does not wait."""


class Server(uvicorn.Server):
    """uvicorn with uvloop and httptools where they are installed, and no log line for each request."""

    def __init__(self, app: ASGIApp, *, handle_signals: bool = True) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                access_log=False,
                log_level="warning",
                server_header=False,
                date_header=False,
                proxy_headers=False,  # nothing here goes by a client's address
                timeout_graceful_shutdown=STOP_GRACE_S,
            )
        )
        self._answering = asyncio.Event()
        self._handle_signals = handle_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Ctrl-C and SIGTERM finish what is being answered; a server inside another program leaves them to it."""
        with super().capture_signals() if self._handle_signals else contextlib.nullcontext():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._answering.set()

    async def start_on(self, listener: socket.socket) -> asyncio.Task[None]:
        """Serve on `listener`; returns once requests are answered. The task ends when the server has stopped."""
        # Accepted connections inherit it: a token must not wait for the one before to be acknowledged.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        ready = asyncio.create_task(self._answering.wait())
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return serving


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop, where that is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
