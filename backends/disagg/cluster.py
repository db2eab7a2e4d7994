"""The coordinator: starts the workers, gives each request a place among them, and puts its tokens in order.

A worker's death is not its requests'. What a prefill worker was computing goes elsewhere. What a decode worker was
saying is taken over by another, which pulls the same KV from where it is kept, computes the tokens said so far in one
chunk, and goes on; where no other is left, by the worker that keeps the KV.

Runs in the event loop of whoever routes (gateway or SDK) and computes nothing: no torch here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import msgspec

from backends.base import BackendError, Forecast, Goals, KVTransfer
from backends.disagg.engine.blocks import prefix_keys
from backends.disagg.engine.step_time import pairs
from backends.disagg.generation import Generation, Kept
from backends.disagg.handle import WorkerHandle
from backends.disagg.messages import (
    Abort,
    Cached,
    Failed,
    FromWorker,
    Meet,
    Resume,
    Sampling,
    Source,
    Started,
    StartFailed,
    State,
    Submit,
    TokenOut,
    Tokens,
    Transferred,
)
from backends.disagg.planner import LOOK_EVERY_S, Planner
from backends.disagg.pools import NotPossible, Pools

log = logging.getLogger("splitroute.cluster")

NO_GOALS = Goals()
_RESTART_DELAYS_S = (0.2, 1.0, 5.0, 15.0)
"""Waits before a dead worker is started again; the last repeats."""
_STRIKES = 3
"""A request that loses so many workers in a row without a new token is given up: it may be what kills them."""
_PATIENCE_S = 30.0
"""How long an answer that has begun waits for a worker to come back where none is left."""
_SILENCE_S = 60.0
"""A worker that says nothing for so long while it has something to do is hung, and killed. They say something every two
seconds, and between any two steps."""


class Cluster:
    """A prefill pool and a decode pool, or a pool of unified workers (`prefill` empty)."""

    def __init__(self, workers: list[WorkerHandle], *, adaptive: bool = False, planner: bool = False) -> None:
        self.pools = Pools(workers, adaptive=adaptive)
        self.recoveries = 0
        """Times that a request went on elsewhere because a worker was lost."""
        self._planning = planner
        self._tasks: dict[WorkerHandle | str, asyncio.Task[None]] = {}
        self._next_request = secrets.randbits(48) << 15
        self._parked: dict[Generation, asyncio.TimerHandle] = {}

    @property
    def workers(self) -> list[WorkerHandle]:
        return self.pools.workers

    @property
    def prefill(self) -> list[WorkerHandle]:
        return self.pools.of("prefill")

    @property
    def decode(self) -> list[WorkerHandle]:
        return self.pools.of("decode", "unified")

    async def start(self, timeout_s: float) -> None:
        """Start every worker. All are up then, or none is left and BackendError is raised; only those on other hosts
        may be missing, of which others of their pool take the place until they come."""
        spawning = [asyncio.create_task(self._begin(worker)) for worker in self.workers]
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
        for worker in self.workers:
            if worker.up:
                self.introduce(worker)
        self._tasks = {worker: asyncio.create_task(self._watch(worker)) for worker in self.workers}
        self._tasks["silent"] = asyncio.create_task(self._kill_the_silent())
        if self._planning:
            self._tasks["planner"] = asyncio.create_task(self._plan())

    async def _begin(self, worker: WorkerHandle) -> None:
        try:
            await worker.spawn()
        except BackendError as error:
            pool = self.pools.of(worker.role)
            if worker.address is None or all(other.address is not None for other in pool):
                raise
            log.error("%s", error.message)

    async def aclose(self) -> None:
        """Stop every worker and fail what they were serving. Safe to call twice."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generation in {*self._parked, *(one for worker in self.workers for one in worker.active.values())}:
            self._give_up(generation, BackendError("the cluster is stopping", status=503))
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    # --- requests ------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: list[int], sampling: Sampling, goals: Goals = NO_GOALS, grammar: str | None = None
    ) -> Generation:
        """Give a request to the workers that suit it best. Raises BackendError (503) where none is up."""
        generation = Generation(prompt_ids, sampling, goals, grammar)
        generation.keys = prefix_keys(prompt_ids, self.workers[0].config.block_size)
        try:
            self._place(generation)
        except NotPossible as error:
            raise BackendError(str(error), status=503, retry_after_s=1) from None
        return generation

    def foresee(self, prompt_ids: list[int], max_tokens: int, goals: Goals) -> Forecast | None:
        """What would become of a request that came now; None where no worker is up."""
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, top_p=1.0, seed=0, stop_ids=[])
        generation = Generation(prompt_ids, sampling, goals, None)
        generation.keys = prefix_keys(prompt_ids, self.workers[0].config.block_size)
        return self.pools.foresee(generation)

    def _place(self, generation: Generation) -> None:
        """Send a request, new or interrupted, where it is computed and decoded. Raises NotPossible."""
        if (kept := generation.kept) is not None:
            self._take_over(generation, kept)
            return
        place = self.pools.place(generation)
        submit = self._message(generation, ttft_s=generation.goals.ttft_s)
        generation.placement = place.why
        generation.landed = False
        if place.prefill is not None:
            assert place.prefill.started is not None
            address, started = place.prefill.reached_from(place.decode), place.prefill.started
            generation.kept = Kept(place.prefill, Source(address, started.incarnation, submit.request))
            handed = msgspec.structs.replace(submit, hand_over=True, replay=[], tpot_s=None)
            self._give(place.prefill, generation, handed)
            submit = msgspec.structs.replace(submit, request=self._number(), source=generation.kept.source)
        generation.serving = place.decode
        self._give(place.decode, generation, submit)
        self._expect(generation, place.prefill or place.decode)

    def _take_over(self, generation: Generation, kept: Kept) -> None:
        """Let another worker go on from the KV that is kept; where there is none, the one that keeps it."""
        generation.landed = False
        host = self.pools.host(kept.worker)
        if host is not None:
            generation.serving = host
            generation.placement += f"; {host.name} took it over"
            source = msgspec.structs.replace(kept.source, address=kept.worker.reached_from(host))
            self._give(host, generation, self._message(generation, source=source))
            return
        generation.serving = kept.worker
        generation.kept = None
        generation.placement += f"; {kept.worker.name} went on with it itself"
        kept.worker.send(Resume(kept.source.request, generation.tokens, generation.goals.tpot_s))

    def _message(self, generation: Generation, *, source: Source | None = None, ttft_s: float | None = None) -> Submit:
        """`generation` under a number of its own, from where its answer stands."""
        return Submit(
            self._number(),
            generation.prompt_ids,
            generation.sampling,
            source,
            replay=generation.tokens,
            ttft_s=ttft_s,
            tpot_s=generation.goals.tpot_s,
            grammar=generation.grammar,
        )

    def _number(self) -> int:
        self._next_request += 1
        return self._next_request

    def _give(self, worker: WorkerHandle, generation: Generation, message: Submit) -> None:
        worker.active[message.request] = generation
        generation.parts[message.request] = worker
        worker.send(message)

    def _expect(self, generation: Generation, worker: WorkerHandle) -> None:
        tokens = len(generation.prompt_ids) - self.pools.cached_tokens(worker, generation)
        worker.expect(generation.keys)
        worker.prompt_backlog += tokens
        worker.backlog_pairs += pairs(len(generation.prompt_ids) - tokens, tokens)
        generation.computing = (worker, tokens)

    def _settle(self, generation: Generation) -> None:
        """The prompt of `generation` is computed, or never will be."""
        if generation.computing is not None:
            worker, tokens = generation.computing
            generation.computing = None
            worker.prompt_backlog = max(0, worker.prompt_backlog - tokens)
            computed = pairs(len(generation.prompt_ids) - tokens, tokens)
            worker.backlog_pairs = max(0.0, worker.backlog_pairs - computed)
            worker.expect_no_more(generation.keys)

    def end(self, generation: Generation) -> None:
        """Free what `generation` still holds anywhere: it finished, or its client is gone."""
        generation.stop()
        if (waiting := self._parked.pop(generation, None)) is not None:
            waiting.cancel()
        self._recall(generation)
        generation.kept = None

    def _recall(self, generation: Generation, *, keep: int | None = None) -> None:
        """Let every worker forget `generation`, but for what it is called `keep`."""
        if keep is None:
            self._settle(generation)
        for number in [number for number in generation.parts if number != keep]:
            worker = generation.parts.pop(number)
            worker.active.pop(number, None)
            worker.send(Abort(number))

    def _give_up(self, generation: Generation, error: BackendError) -> None:
        generation.fail(error)
        self.end(generation)

    def _recover(self, generation: Generation, reason: str) -> None:
        """A worker that `generation` needed is lost: let it go on elsewhere."""
        if generation.finished:
            self.end(generation)
            return
        self._recall(generation, keep=generation.kept.source.request if generation.kept else None)
        if generation.strike() > _STRIKES:
            self._give_up(generation, BackendError(reason, status=503))
            return
        try:
            self._place(generation)
            self.recoveries += 1
        except NotPossible:
            if not generation.tokens:  # nothing has been shown yet: others may serve it sooner
                self._give_up(generation, BackendError(reason, status=503, retry_after_s=1))
            else:
                loop = asyncio.get_running_loop()
                lost = BackendError(f"{reason}; no worker came back", status=503)
                self._parked[generation] = loop.call_later(_PATIENCE_S, self._give_up, generation, lost)

    # --- workers -------------------------------------------------------------------------------------

    async def _watch(self, worker: WorkerHandle) -> None:
        """Read a worker's messages; when it dies, move its requests and start it again."""
        failures = 0
        while True:
            try:
                while worker.up:
                    self._handle(worker, await worker.receive())
                    failures = 0
            except EOFError:
                worker.started = None
                self._lost(worker, f"{worker.name} died")
                how = await worker.buried()
                log.error("%s died (%s)", worker.name, how)
            while not worker.up:
                await asyncio.sleep(_RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)])
                failures += 1
                try:
                    await worker.spawn()
                except BackendError as error:
                    log.error("%s", error.message)
            self.introduce(worker)
            for generation, waiting in list(self._parked.items()):
                waiting.cancel()
                del self._parked[generation]
                self._recover(generation, f"{worker.name} died")

    def introduce(self, worker: WorkerHandle) -> None:
        """Let a worker that is up connect to those whose KV it may be sent for, and others to it."""
        for other in self.workers:
            for source, target in ((worker, other), (other, worker)):
                if source is not target and source.role == "prefill" and source.started and target.up:
                    target.send(Meet(source.reached_from(target), source.started.incarnation))

    def _lost(self, worker: WorkerHandle, reason: str) -> None:
        """`worker` is gone, and with it what it computed and kept."""
        self.pools.forget(worker)
        interrupted: dict[Generation, None] = {}
        for number, generation in list(worker.active.items()):
            generation.parts.pop(number, None)
            kept = generation.kept
            if kept is not None and kept.source.request == number:
                generation.kept = None
                if generation.landed:
                    continue  # whoever decodes has all it needs
            interrupted[generation] = None
        worker.active.clear()
        for generation in interrupted:
            self._recover(generation, reason)

    async def _kill_the_silent(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SILENCE_S / 10)
            for worker in self.workers:
                if worker.up and worker.active and loop.time() - worker.heard_at > _SILENCE_S:
                    log.error("%s has said nothing for %g s and is killed", worker.name, _SILENCE_S)
                    worker.kill()

    def _handle(self, worker: WorkerHandle, message: FromWorker) -> None:
        match message:
            case Tokens(tokens):
                for token in tokens:
                    self._token(worker, token)
            case Transferred():
                self._transferred(worker, message)
            case Failed():
                self._failed(worker, message)
            case Cached(added, removed):
                worker.cached.update(added)
                worker.cached.difference_update(removed)
            case State():
                worker.state = message
            case Started() | StartFailed():
                log.error("%s spoke out of turn: %s", worker.name, type(message).__name__)

    def _token(self, worker: WorkerHandle, token: TokenOut) -> None:
        generation = worker.active.get(token.request)
        if generation is None:
            return
        generation.put(token)
        if token.finish_reason is not None:
            worker.active.pop(token.request, None)  # the worker has freed it already
            generation.parts.pop(token.request, None)
            self.end(generation)
        else:
            self._settle(generation)

    def _failed(self, worker: WorkerHandle, message: Failed) -> None:
        generation = worker.active.pop(message.request, None)
        if generation is None:
            return
        generation.parts.pop(message.request, None)
        if not message.kv_lost:
            self._give_up(generation, BackendError(message.message, status=message.status))
            return
        if generation.kept is not None:
            generation.distrusted.add(generation.kept.worker)
            generation.kept = None
        self._recover(generation, message.message)

    def _transferred(self, worker: WorkerHandle, message: Transferred) -> None:
        generation = worker.active.get(message.request)
        if generation is None or generation.kept is None:
            return
        generation.landed = True
        facts = msgspec.structs.asdict(message)
        del facts["request"]
        source = generation.kept.worker
        generation.transfer = transfer = KVTransfer(prefill=source.name, decode=worker.name, **facts)
        self.pools.observe(source, worker, transfer, generation)

    # --- the pools -----------------------------------------------------------------------------------

    async def adopt(self, worker: WorkerHandle) -> None:
        """Start one more worker and let it serve. Raises BackendError."""
        try:
            await worker.spawn()
        except BaseException:
            await worker.stop()
            raise
        self.pools.workers.append(worker)
        self.introduce(worker)
        self._tasks[worker] = asyncio.create_task(self._watch(worker))

    async def dismiss(self, worker: WorkerHandle, *, now: bool) -> None:
        """Stop a worker for good, once it serves and keeps nothing; or `now`, as if it had died."""
        while worker.active and worker.up and not now:  # noqa: ASYNC110 - nothing tells of the last one
            await asyncio.sleep(0.05)
        if worker not in self.pools.workers:
            return
        self.pools.workers.remove(worker)
        self._tasks.pop(worker).cancel()
        await worker.stop()
        self._lost(worker, f"{worker.name} was removed")

    def flip(self, worker: WorkerHandle) -> None:
        """Let a prefill worker be a decode worker from the next request on, or the other way round."""
        worker.role = "decode" if worker.role == "prefill" else "prefill"
        self.introduce(worker)

    async def _plan(self) -> None:
        """Flip workers by load."""
        planner = Planner()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            name = planner.look(self.pools.pressures(), asyncio.get_running_loop().time())
            if name is None:
                continue
            worker = next(worker for worker in self.workers if worker.name == name)
            self.flip(worker)
            log.warning("%s is a %s worker from now on: that pool could not keep up", name, worker.role)
