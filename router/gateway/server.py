"""Runs the gateway's application on a socket that is already bound."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette

STOP_GRACE_S = 10
"""How long Ctrl-C waits for answers under way; a second one does not wait."""


class Server(uvicorn.Server):
    """uvicorn with uvloop and httptools where they are installed, and no log line for each request."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=STOP_GRACE_S,
            )
        )
        self._answering = asyncio.Event()

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
