"""A node: keeps a worker on this host for a coordinator on another.

It listens, lets in who knows the cluster's secret, starts the worker that one asks for, and passes frames between the
two. One coordinator at a time. Where that one goes away, however it does, everything it had here is freed; the worker
itself stays, with its model loaded and its prefix cache, for the next coordinator that wants the same (or not: `keep`).

No torch here: the worker's process has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from backends.base import BackendError
from backends.disagg.control import ControlError, Streams, admit, read_frame
from backends.disagg.lives import LocalLife, cores
from backends.disagg.messages import (
    LENGTH,
    Reset,
    Started,
    StartFailed,
    TLSFiles,
    WorkerConfig,
    decode_config,
    decode_from_worker,
    frame,
)
from backends.disagg.tls import server_context
from backends.models import ModelError, fingerprint, resolve

log = logging.getLogger("splitroute.node")

_MAX_STRANGERS = 32
"""Connections that have not proved anything yet; more are closed at once."""
_MAX_CONFIG_BYTES = 1 << 16
_RESET_S = 10.0
"""A worker that has not let go of everything by then is hung, and another is started."""


@dataclass(frozen=True)
class NodeOptions:
    secret: str
    kv_host: str | None = None
    """The address that others pull KV from; None for the one that the coordinator used."""
    kv_port: int = 0
    keep: bool = True
    """Keep the worker for the next coordinator."""
    tls: TLSFiles | None = None


@dataclass
class _Kept:
    """The worker of this node, and whom its frames go to."""

    config: WorkerConfig
    life: LocalLife
    streams: Streams
    coordinator: asyncio.StreamWriter | None = None
    owed: int = 1
    """How often it has still to say that it started, or could not: at first, and after each Reset."""
    started: asyncio.Future[bytes] | None = None
    """Set with the last of those."""
    reading: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        """Pass on what the worker says, until it ends."""
        reader, _ = self.streams
        with contextlib.suppress(EOFError, ControlError):
            while True:
                said = await read_frame(reader)
                if self.owed:
                    if not isinstance(decode_from_worker(said[LENGTH.size :]), Started | StartFailed):
                        continue
                    self.owed -= 1
                    if self.owed:
                        continue
                    if self.started is not None and not self.started.done():
                        self.started.set_result(said)
                if self.coordinator is not None:
                    self.coordinator.write(said)
                    with contextlib.suppress(OSError):
                        await self.coordinator.drain()
        if self.started is not None and not self.started.done():
            self.started.set_exception(EOFError())
        self.gone.set()

    def reset(self) -> None:
        """Let it forget what it was asked; nothing is passed on before it says that it has."""
        self.owed += 1
        self.streams[1].write(frame(Reset()))

    async def end(self) -> None:
        await self.life.stop(None if self.gone.is_set() else self.streams[1])
        self.streams[1].close()
        if self.reading is not None:
            await self.reading


class Node:
    """`start` listens; `aclose` ends all. `say` is called with what a person may want to see."""

    def __init__(self, options: NodeOptions, say: Callable[[str], None] = log.info) -> None:
        self.options = options
        self._say = say
        self._server: asyncio.Server | None = None
        self._strangers = 0
        self._busy = asyncio.Lock()
        self._kept: _Kept | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Let coordinators in on `listener`. Raises OSError where a TLS file is not what it should be."""
        tls = self.options.tls
        context = None if tls is None else server_context(tls.cert, tls.key)
        self._server = await asyncio.start_server(self._accept, sock=listener, ssl=context)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._end_worker()

    # --- connections ---------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= _MAX_STRANGERS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        where = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        try:
            self._strangers += 1
            try:
                await admit(reader, writer, self.options.secret)
            finally:
                self._strangers -= 1
            await self._serve(reader, writer, where)
        except (ControlError, msgspec.MsgspecError) as error:
            log.warning("%s was let go: %s", where, error)
        except (EOFError, OSError, asyncio.CancelledError):
            pass  # the coordinator is gone, or this node is
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str) -> None:
        """Be the worker of a coordinator that has proved what it must."""
        async with asyncio.timeout(_RESET_S):
            body = (await read_frame(reader, _MAX_CONFIG_BYTES))[LENGTH.size :]
        asked = decode_config(body)
        if self._busy.locked():
            writer.write(frame(StartFailed("this node's worker is another gateway's", "stop that one, or add a node")))
            return
        async with self._busy:
            try:
                address = self.options.kv_host or writer.get_extra_info("sockname")[0]
                config = await asyncio.to_thread(self._own, asked, address)
                kept, started = await self._worker(config, writer)
            except ModelError as error:
                writer.write(frame(StartFailed(error.message, error.hint)))
                return
            except EOFError:
                writer.write(frame(StartFailed("the worker died while it started", "its last words are on that host")))
                return
            if isinstance(decode_from_worker(started[LENGTH.size :]), StartFailed):
                await self._end_worker()
                return
            self._say(f"{config.name} serves {config.model} for {where}")
            try:
                await self._pass_on(reader, kept)
            finally:
                kept.coordinator = None
                if self.options.keep and not kept.gone.is_set():
                    kept.reset()  # what was being computed is nobody's now
                    self._say(f"{where} is gone; {config.name} is free, and keeps its model")
                else:
                    await self._end_worker()
                    self._say(f"{where} is gone, and so is {config.name}")

    async def _pass_on(self, reader: asyncio.StreamReader, kept: _Kept) -> None:
        """What the coordinator says, until either side ends."""
        gone = asyncio.create_task(kept.gone.wait())
        try:
            while True:
                frames = asyncio.create_task(read_frame(reader))
                await asyncio.wait({frames, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not frames.done():
                    frames.cancel()
                    return
                kept.streams[1].write(frames.result())
                await kept.streams[1].drain()
        except (EOFError, OSError, ControlError):
            return
        finally:
            gone.cancel()

    # --- the worker ----------------------------------------------------------------------------------

    def _own(self, asked: WorkerConfig, address: str) -> WorkerConfig:
        """What is asked for, with what this host has. Raises ModelError."""
        files = resolve(asked.model, pull_missing=True)
        if (mark := fingerprint(files)) != asked.fingerprint:
            raise ModelError(
                f"{asked.model} is another model on this host: fingerprint {mark} here, {asked.fingerprint} there",
                hint="put the same files on both hosts",
            )
        return msgspec.structs.replace(
            asked,
            model_path=str(files.path),
            model_kind=files.kind,
            threads=asked.threads or len(cores()),
            cpus=None,
            kv_host=address,
            kv_port=self.options.kv_port,
            secret=self.options.secret,
            tls=self.options.tls,
        )

    async def _worker(self, config: WorkerConfig, coordinator: asyncio.StreamWriter) -> tuple[_Kept, bytes]:
        """A worker like that, and its first frame, which the coordinator has, with all that follow. Raises EOFError
        where it died instead."""
        kept = self._kept
        # What it is called, and which pool it is in, is the coordinator's business.
        if kept is not None and msgspec.structs.replace(kept.config, name=config.name, role=config.role) == config:
            kept.started = asyncio.get_running_loop().create_future()
            kept.reset()
            kept.coordinator = coordinator
            try:
                async with asyncio.timeout(_RESET_S):
                    return kept, await kept.started
            except (TimeoutError, EOFError):
                kept.coordinator = None
                kept.life.kill()
        await self._end_worker()
        life = LocalLife()
        kept = _Kept(config, life, await life.begin(config))
        self._kept = kept
        kept.coordinator = coordinator
        kept.started = asyncio.get_running_loop().create_future()
        kept.reading = asyncio.create_task(kept.read())
        try:
            return kept, await kept.started
        except BaseException:
            life.kill()
            await self._end_worker()
            raise

    async def _end_worker(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            with contextlib.suppress(BackendError):
                await kept.end()
