"""One worker as the coordinator sees it: its process now, and again after it died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec

from backends.base import BackendError
from backends.disagg.generation import Generation
from backends.disagg.messages import (
    LENGTH,
    FromWorker,
    Role,
    Started,
    StartFailed,
    State,
    Stop,
    WorkerConfig,
    decode_from_worker,
    frame,
)

_STOP_GRACE_S = 5.0


class WorkerHandle:
    """A slot for a worker. Its process comes and goes; its role may change while it serves."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.role: Role = config.role
        self.wrapper: tuple[str, ...] = ()
        """A command to start the process with, such as `numactl -N 1`."""
        self.draining = False
        """It gets nothing new."""
        self.process: asyncio.subprocess.Process | None = None
        self.started: Started | None = None
        self.state: State | None = None
        self.heard_at = 0.0
        """When it last said something, by the event loop's clock."""
        self.active: dict[int, Generation] = {}
        """What it serves, and what it keeps the KV of, by the number it was given."""
        self.prompt_backlog = 0
        """Prompt tokens given to this worker whose first token is not there yet."""
        self.cached: set[bytes] = set()
        """Keys of the prompt blocks it holds."""
        self._coming: dict[bytes, int] = {}
        """Keys of blocks it is about to compute."""
        self._prefilled_before = self._replayed_before = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def up(self) -> bool:
        return self.started is not None

    @property
    def open(self) -> bool:
        """Whether it may be given something new."""
        return self.up and not self.draining

    @property
    def step(self) -> tuple[float, float, float, float]:
        """How long its steps take: see `engine.step_time`; zeros while it is down."""
        known = self.state or self.started
        return known.step if known else (0.0, 0.0, 0.0, 0.0)

    @property
    def decoding(self) -> int:
        """Answers it decodes, or will."""
        return sum(generation.serving is self for generation in self.active.values())

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed in this slot, by every process that was in it, as far as they told."""
        return self._prefilled_before + (self.state.prefilled_tokens if self.state else 0)

    @property
    def replayed_tokens(self) -> int:
        """Tokens of answers that were computed again from where another worker left off."""
        return self._replayed_before + (self.state.replayed_tokens if self.state else 0)

    # --- life ----------------------------------------------------------------------------------------

    async def spawn(self) -> None:
        """Start the process and wait until its model is loaded. Raises BackendError saying why not."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.config.threads)}
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
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self.send(self.config)
        try:
            first = await self.receive()
        except EOFError:
            code = await self.process.wait()
            raise BackendError(
                f"{self.name} died while it started ({describe_exit(code)})",
                status=503,
                hint="its last words are on stderr above; is there enough memory for the model?",
            ) from None
        if isinstance(first, StartFailed):
            raise BackendError(f"{self.name} could not start: {first.message}", status=503, hint=first.hint)
        assert isinstance(first, Started)
        self.started = first

    def send(self, message: msgspec.Struct) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> FromWorker:
        """The next message. Raises EOFError where the process is gone."""
        assert self._reader is not None
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            message = decode_from_worker(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        self.heard_at = asyncio.get_running_loop().time()
        return message

    async def buried(self) -> str:
        """How its process ended; what is known of it is forgotten."""
        assert self.process is not None
        self._prefilled_before, self._replayed_before = self.prefilled_tokens, self.replayed_tokens
        self.started = self.state = None
        self.cached.clear()
        self._coming.clear()
        self.prompt_backlog = 0
        self.close_connection()
        return describe_exit(await self.process.wait())

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def stop(self) -> None:
        """Ask it to exit, wait, and kill it where it does not; one that is still starting cannot hear."""
        was_up, self.started = self.up, None
        if self.process is None:
            return
        if was_up:
            self.send(Stop())
        else:
            self.kill()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()
        finally:
            self.close_connection()

    def close_connection(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # --- the prefixes it holds -----------------------------------------------------------------------

    def cached_blocks(self, keys: list[bytes]) -> int:
        """How many blocks of a prompt with `keys`, from its beginning, are here or on their way."""
        for index, key in enumerate(keys):
            if key not in self.cached and key not in self._coming:
                return index
        return len(keys)

    def expect(self, keys: list[bytes]) -> None:
        """A prompt with `keys` is about to be computed here."""
        for key in keys:
            self._coming[key] = self._coming.get(key, 0) + 1

    def expect_no_more(self, keys: list[bytes]) -> None:
        for key in keys:
            left = self._coming.get(key, 0) - 1
            if left > 0:
                self._coming[key] = left
            else:
                self._coming.pop(key, None)


def describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
