"""How a worker comes to be, and how it ends: as a process of the coordinator's, or behind a node on another host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from typing import Protocol

import msgspec

from backends.base import BackendError
from backends.disagg.control import ControlError, Streams, connect
from backends.disagg.messages import Stop, WorkerConfig, frame
from backends.disagg.tls import client_context

_STOP_GRACE_S = 5.0


def cores() -> list[int]:
    """The processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


class Life(Protocol):
    """One worker's process, time after time."""

    async def begin(self, config: WorkerConfig) -> Streams:
        """Start it and tell it what it is to be. Raises BackendError."""

    async def ended(self) -> str:
        """How it ended, in words; waits for that."""

    def kill(self) -> None:
        """End it at once."""

    async def stop(self, writer: asyncio.StreamWriter | None) -> None:
        """End it kindly, and if that fails, at once. `writer`: where it listens; None where it cannot yet."""


class LocalLife:
    """A child process. It exits when its coordinator does, however that ends."""

    def __init__(self, wrapper: tuple[str, ...] = ()) -> None:
        self.wrapper = wrapper
        """A command to start the process with, such as `numactl -N 1`."""
        self.process: asyncio.subprocess.Process | None = None

    async def begin(self, config: WorkerConfig) -> Streams:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads)}
            self.process = await asyncio.create_subprocess_exec(
                *self.wrapper,
                sys.executable,
                "-m",
                "backends.disagg.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(frame(config))
        return reader, writer

    async def ended(self) -> str:
        assert self.process is not None
        code = await self.process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def stop(self, writer: asyncio.StreamWriter | None) -> None:
        if self.process is None:
            return
        if writer is None:
            self.kill()
        else:
            writer.write(frame(Stop()))
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()


class RemoteLife:
    """A worker behind a node (`splitroute worker`) on another host, for as long as the connection lasts."""

    def __init__(self, address: str, secret: str, ca: str | None = None) -> None:
        self.address = address
        self._secret = secret
        self._ca = ca
        self._writer: asyncio.StreamWriter | None = None

    async def begin(self, config: WorkerConfig) -> Streams:
        try:
            tls: ssl.SSLContext | None = None if self._ca is None else client_context(self._ca)
            reader, self._writer = await connect(self.address, self._secret, tls)
        except (ControlError, OSError) as error:
            raise BackendError(
                f"{config.name}: the worker at {self.address} cannot be had: {error}",
                status=503,
                hint="start it there, with the same secret: splitroute worker --listen HOST:PORT --secret-file FILE",
            ) from None
        # The node has the secret and TLS files of its own: neither crosses the network.
        self._writer.write(frame(msgspec.structs.replace(config, secret="", tls=None)))
        return reader, self._writer

    async def ended(self) -> str:
        return f"its connection to {self.address} ended"

    def kill(self) -> None:
        """The node frees or restarts what answers no more."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def stop(self, writer: asyncio.StreamWriter | None) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
