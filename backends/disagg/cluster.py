"""The coordinator: starts the workers, gives each request to a pair of them, and puts its tokens in order.

Runs in the event loop of whoever routes (gateway or SDK) and computes nothing: no torch here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
from collections import deque
from dataclasses import dataclass, field

import msgspec

from backends.base import BackendError, Goals, KVTransfer
from backends.disagg.messages import (
    LENGTH,
    Abort,
    Failed,
    FromWorker,
    Sampling,
    Started,
    StartFailed,
    State,
    Stop,
    Submit,
    TokenOut,
    Tokens,
    Transferred,
    WorkerConfig,
    decode_from_worker,
    frame,
)

log = logging.getLogger("splitroute.cluster")

NO_GOALS = Goals()
_STOP_GRACE_S = 5.0
_RESTART_DELAYS_S = (0.2, 1.0, 5.0, 15.0)
"""Waits before a dead worker is started again; the last repeats."""


@dataclass(eq=False)
class Generation:
    """A request being served. Iterate for its tokens in order; always `Cluster.end` it."""

    request: int
    prefill: WorkerHandle | None = None
    decode: WorkerHandle | None = None
    backlog: int = 0
    """Prompt tokens that still count as waiting on the worker that computes them."""
    transfer: KVTransfer | None = None
    finished: bool = False
    _next_index: int = 0
    _early: dict[int, TokenOut] = field(default_factory=dict)
    """Tokens of one worker that arrived before the other's: ordered by index, none twice."""
    _ready: deque[TokenOut | BackendError] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def computing(self) -> WorkerHandle:
        """The worker that computes the prompt."""
        worker = self.prefill or self.decode
        assert worker is not None
        return worker

    def put(self, token: TokenOut) -> None:
        if token.index < self._next_index:
            return
        self._early[token.index] = token
        while (following := self._early.pop(self._next_index, None)) is not None:
            self._next_index += 1
            self._ready.append(following)
            self.finished = self.finished or following.finish_reason is not None
        self._wake.set()

    def fail(self, error: BackendError) -> None:
        if not self.finished:
            self.finished = True
            self._ready.append(error)
            self._wake.set()

    def stop(self) -> None:
        """No more tokens are wanted; who waits for one is told so."""
        self.finished = True
        self._wake.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenOut:
        """The next token; the one with a finish reason is the last. Raises BackendError."""
        while not self._ready:
            if self.finished:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        item = self._ready.popleft()
        if isinstance(item, BackendError):
            raise item
        return item


class WorkerHandle:
    """One worker slot: its process now, and again after it died."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.process: asyncio.subprocess.Process | None = None
        self.started: Started | None = None
        self.state: State | None = None
        self.active: dict[int, Generation] = {}
        self.prompt_backlog = 0
        """Prompt tokens given to this worker whose first token is not there yet."""
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    @property
    def up(self) -> bool:
        return self.started is not None

    async def spawn(self) -> None:
        """Start the process and wait until its model is loaded. Raises BackendError saying why not."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.config.threads)}
            self.process = await asyncio.create_subprocess_exec(
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
                f"{self.config.name} died while it started ({describe_exit(code)})",
                status=503,
                hint="its last words are on stderr above; is there enough memory for the model?",
            ) from None
        if isinstance(first, StartFailed):
            raise BackendError(f"{self.config.name} could not start: {first.message}", status=503, hint=first.hint)
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
            return decode_from_worker(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    async def stop(self) -> None:
        """Ask it to exit, wait, and kill it where it does not; one that is still starting cannot hear."""
        was_up, self.started = self.up, None
        if self.process is None:
            return
        if was_up:
            self.send(Stop())
        else:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        finally:
            self.close_connection()

    def close_connection(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


class Cluster:
    """A prefill pool and a decode pool, or a pool of unified workers (`prefill` empty)."""

    def __init__(self, prefill: list[WorkerConfig], decode: list[WorkerConfig]) -> None:
        self.prefill = [WorkerHandle(config) for config in prefill]
        self.decode = [WorkerHandle(config) for config in decode]
        self._tasks: list[asyncio.Task[None]] = []
        self._next_request = secrets.randbits(48) << 15
        self._closing = False

    @property
    def workers(self) -> list[WorkerHandle]:
        return self.prefill + self.decode

    async def start(self, timeout_s: float) -> None:
        """Start every worker; all are up, or none is left. Raises BackendError."""
        spawning = [asyncio.create_task(worker.spawn()) for worker in self.workers]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*spawning)
        except BaseException as error:
            for task in spawning:
                task.cancel()
            await asyncio.gather(*spawning, return_exceptions=True)
            await self.aclose()
            if isinstance(error, TimeoutError):
                raise BackendError(
                    f"the cluster's workers were not ready within {timeout_s:g} s",
                    status=503,
                    hint="raise start_timeout_s of the provider, or use a smaller model",
                ) from None
            raise
        self._tasks = [asyncio.create_task(self._watch(worker)) for worker in self.workers]

    async def aclose(self) -> None:
        """Stop every worker and fail what they were serving. Safe to call twice."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for worker in self.workers:
            self._fail_all(worker, "the cluster is stopping")
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    # --- requests ------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: list[int], sampling: Sampling, goals: Goals = NO_GOALS, grammar: str | None = None
    ) -> Generation:
        """Give a request to the least busy workers. Raises BackendError (503) where a pool is down."""
        self._next_request += 1
        request = self._next_request
        generation = Generation(request, backlog=len(prompt_ids))
        if self.prefill:
            generation.prefill = self._pick(self.prefill, "prefill")
        if not self.prefill or sampling.max_tokens > 1:
            generation.decode = self._pick(self.decode, "decode")
        ttft_s, tpot_s = _seconds(goals.ttft_ms), _seconds(goals.tpot_ms)
        source = None
        if generation.prefill is not None:
            assert generation.prefill.started is not None
            source = generation.prefill.started.address
            submit = Submit(request, prompt_ids, sampling, ttft_s=ttft_s, grammar=grammar)
            self._give(generation.prefill, generation, submit)
        if generation.decode is not None:
            submit = Submit(request, prompt_ids, sampling, source, ttft_s, tpot_s, grammar)
            self._give(generation.decode, generation, submit)
        generation.computing.prompt_backlog += generation.backlog
        return generation

    def _pick(self, pool: list[WorkerHandle], role: str) -> WorkerHandle:
        up = [worker for worker in pool if worker.up]
        if not up:
            raise BackendError(f"no {role} worker is up; a dead one is started again", status=503, retry_after_s=1)
        return min(up, key=lambda worker: (worker.prompt_backlog, len(worker.active)))

    def _give(self, worker: WorkerHandle, generation: Generation, message: Submit) -> None:
        worker.active[generation.request] = generation
        worker.send(message)

    def end(self, generation: Generation) -> None:
        """Free what `generation` still holds anywhere: it finished, or its client is gone."""
        generation.stop()
        for worker in (generation.prefill, generation.decode):
            if worker is not None and worker.active.pop(generation.request, None) is not None:
                worker.send(Abort(generation.request))
        self._settle(generation)

    def _settle(self, generation: Generation) -> None:
        """The prompt of `generation` is computed, or never will be."""
        generation.computing.prompt_backlog -= generation.backlog
        generation.backlog = 0

    # --- workers -------------------------------------------------------------------------------------

    async def _watch(self, worker: WorkerHandle) -> None:
        """Read a worker's messages; when it dies, fail its requests and start it again."""
        failures = 0
        while True:
            try:
                while True:
                    self._handle(worker, await worker.receive())
                    failures = 0
            except EOFError:
                pass
            assert worker.process is not None
            worker.started = worker.state = None
            worker.close_connection()
            code = await worker.process.wait()
            log.error("%s died (%s)", worker.config.name, describe_exit(code))
            self._fail_all(worker, f"{worker.config.name} died ({describe_exit(code)})")
            while not worker.up:
                await asyncio.sleep(_RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)])
                failures += 1
                try:
                    await worker.spawn()
                except BackendError as error:
                    log.error("%s", error.message)

    def _fail_all(self, worker: WorkerHandle, reason: str) -> None:
        for generation in list(worker.active.values()):
            generation.fail(BackendError(reason, status=503))
            worker.active.pop(generation.request, None)
            self.end(generation)

    def _handle(self, worker: WorkerHandle, message: FromWorker) -> None:
        match message:
            case Tokens(tokens):
                for token in tokens:
                    self._token(worker, token)
            case Transferred():
                self._transferred(worker, message)
            case Failed(request, reason, status):
                generation = worker.active.pop(request, None)
                if generation is not None:
                    generation.fail(BackendError(reason, status=status))
                    self.end(generation)
            case State():
                worker.state = message
            case Started() | StartFailed():
                log.error("%s spoke out of turn: %s", worker.config.name, type(message).__name__)

    def _token(self, worker: WorkerHandle, token: TokenOut) -> None:
        generation = worker.active.get(token.request)
        if generation is None:
            return
        generation.put(token)
        if token.finish_reason is not None:
            worker.active.pop(token.request, None)  # the worker has freed it already
            self.end(generation)
        elif generation.backlog:
            self._settle(generation)

    def _transferred(self, worker: WorkerHandle, message: Transferred) -> None:
        generation = worker.active.get(message.request)
        if generation is None:
            return
        facts = msgspec.structs.asdict(message)
        del facts["request"]
        generation.transfer = KVTransfer(**facts)
        if generation.prefill is not None:  # its worker's death no longer concerns this request
            generation.prefill.active.pop(message.request, None)
