"""One worker as the coordinator sees it: its process now, and again after it died."""

from __future__ import annotations

import asyncio

import msgspec

from backends.base import BackendError
from backends.disagg.engine.step_time import UNKNOWN, Coefficients
from backends.disagg.generation import Generation
from backends.disagg.lives import Life, LocalLife
from backends.disagg.messages import (
    LENGTH,
    FromWorker,
    Role,
    Started,
    StartFailed,
    State,
    WorkerConfig,
    decode_from_worker,
    frame,
)


class WorkerHandle:
    """A slot for a worker. Its process comes and goes; its role may change while it serves."""

    def __init__(self, config: WorkerConfig, life: Life | None = None, address: str | None = None) -> None:
        self.config = config
        self.life = life or LocalLife()
        self.address = address
        """Where its node is; None for a process of this host."""
        self.role: Role = config.role
        self.draining = False
        """It gets nothing new."""
        self.started: Started | None = None
        self.state: State | None = None
        self.heard_at = 0.0
        """When it last said something, by the event loop's clock."""
        self.active: dict[int, Generation] = {}
        """What it serves, and what it keeps the KV of, by the number it was given."""
        self.prompt_backlog = 0
        """Prompt tokens given to this worker whose first token is not there yet."""
        self.backlog_pairs = 0.0
        """What attention has to compute for them: `engine.step_time.pairs`."""
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
    def step(self) -> Coefficients:
        """How long its steps take: see `engine.step_time`; zeros while it is down."""
        known = self.state or self.started
        return known.step if known else UNKNOWN

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
        self._reader, self._writer = await self.life.begin(self.config)
        try:
            first = await self.receive()
        except EOFError:
            raise BackendError(
                f"{self.name} died while it started ({await self.life.ended()})",
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
        self._prefilled_before, self._replayed_before = self.prefilled_tokens, self.replayed_tokens
        self.started = self.state = None
        self.cached.clear()
        self._coming.clear()
        self.prompt_backlog, self.backlog_pairs = 0, 0.0
        self.close_connection()
        return await self.life.ended()

    def kill(self) -> None:
        self.life.kill()

    async def stop(self) -> None:
        """Ask it to exit, wait, and kill it where it does not; one that is still starting cannot hear."""
        was_up, self.started = self.up, None
        try:
            await self.life.stop(self._writer if was_up else None)
        finally:
            self.close_connection()

    def reached_from(self, other: WorkerHandle) -> str:
        """The address at which `other` pulls KV from this one, which is up."""
        assert self.started is not None
        here = self.address is None and other.address is None
        return self.started.addresses[0 if here else -1]

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
