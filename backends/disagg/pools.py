"""The workers of a cluster by role, what is known of each, and who suits a request."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from backends.base import Forecast, KVTransfer
from backends.disagg.engine.step_time import StepLoad, compute_s, predicted, prompt_s
from backends.disagg.generation import Generation
from backends.disagg.handle import WorkerHandle
from backends.disagg.messages import Role
from backends.disagg.placement import Asked, Load, Place, choose
from backends.disagg.planner import Pressure
from backends.disagg.transfers import ALARM_S, PairSpeed

log = logging.getLogger("splitroute.cluster")

_FASTEST = {"unix": 4e9, "tcp": 1e9}
"""KV bytes per second that a pair is taken to move before it has been measured, by kind of address."""
_PROBE_EVERY = 16
"""While a pair's transfers raise the alarm, one request in so many is still sent its way, to see it end."""


class NotPossible(Exception):
    """No worker that could serve is up."""


@dataclass(frozen=True, slots=True)
class Placed:
    prefill: WorkerHandle | None
    decode: WorkerHandle
    why: str


class Pools:
    """`adaptive`: each request is split only where that is predicted to be worth it."""

    def __init__(self, workers: list[WorkerHandle], *, adaptive: bool) -> None:
        self.workers = workers
        self.adaptive = adaptive
        self.pairs: dict[tuple[WorkerHandle, WorkerHandle], PairSpeed] = {}
        self.placed: dict[str, int] = {"split": 0, "whole": 0, "fallback": 0}
        """Requests by how they were placed; `fallback`: whole, because a pool had nobody."""
        self._since_probe = 0

    def of(self, *roles: Role) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.role in roles]

    def cached_tokens(self, worker: WorkerHandle, generation: Generation) -> int:
        """Tokens of the prompt that `worker` need not compute."""
        size = worker.config.block_size
        return min(worker.cached_blocks(generation.keys) * size, len(generation.prompt_ids) - 1)

    def place(self, generation: Generation) -> Placed:
        """Where a request goes whose KV is nowhere yet. Raises NotPossible."""
        prefill = [worker for worker in self.of("prefill") if worker.open and worker not in generation.distrusted]
        decode = [worker for worker in self.of("decode", "unified") if worker.open]
        everybody = decode or prefill or [worker for worker in self.workers if worker.up]
        if not everybody:
            raise NotPossible("no worker is up; a dead one is started again")
        split = bool(prefill and decode) and generation.sampling.max_tokens > 1
        wanted = bool(self.of("prefill"))
        if not split and not self.adaptive:
            worker = self._idlest(generation, prefill, everybody)
            fallback = wanted and generation.sampling.max_tokens > 1
            self.placed["fallback" if fallback else "whole"] += 1
            why = ": a pool has nobody" if fallback else ""
            return Placed(None, worker, f"whole on {worker.name}{why}")
        local = self.adaptive and not self._probe()
        place = self._weigh(generation, prefill if split else [], decode or everybody, local=local)
        kind = "split" if place.prefill else "fallback" if wanted and not split else "whole"
        self.placed[kind] += 1
        predicted = f"{place.ttft_s * 1000:.0f} ms to the first token predicted"
        if place.prefill is None:
            return Placed(None, place.decode, f"whole on {place.decode.name}: {predicted}")
        shown = f", {place.transfer_s * 1000:.0f} ms of transfer to be seen"
        return Placed(place.prefill, place.decode, f"{place.prefill.name} → {place.decode.name}: {predicted}{shown}")

    def foresee(self, generation: Generation) -> Forecast | None:
        """What `place` would find for it now. Changes nothing; None where no worker is up."""
        prefill = [worker for worker in self.of("prefill") if worker.open]
        decode = [worker for worker in self.of("decode", "unified") if worker.open]
        everybody = decode or prefill
        if not everybody:
            return None
        split = bool(prefill and decode) and generation.sampling.max_tokens > 1
        if split or self.adaptive:
            place = self._weigh(generation, prefill if split else [], everybody, local=self.adaptive)
            computes, host, ttft_s = place.prefill or place.decode, place.decode, place.ttft_s
        else:
            computes = host = self._idlest(generation, prefill, everybody)
            ttft_s = self._load(host, generation).prompt_s(len(generation.prompt_ids), generation.goals.tpot_s)
        tpot_s = self._load(host, generation).step_s(1, len(generation.prompt_ids))
        return Forecast(self._load(computes, generation).uncached, ttft_s, tpot_s)

    @staticmethod
    def _idlest(generation: Generation, prefill: list[WorkerHandle], everybody: list[WorkerHandle]) -> WorkerHandle:
        """A lone token needs no decode worker."""
        pool = prefill if prefill and generation.sampling.max_tokens == 1 else everybody
        return min(pool, key=lambda worker: (worker.prompt_backlog, len(worker.active)))

    def _weigh(
        self, generation: Generation, prefill: list[WorkerHandle], decode: list[WorkerHandle], *, local: bool
    ) -> Place[WorkerHandle]:
        asked = Asked(
            prompt_tokens=len(generation.prompt_ids),
            max_tokens=generation.sampling.max_tokens,
            token_bytes=self._token_bytes(),
            ttft_s=generation.goals.ttft_s,
            tpot_s=generation.goals.tpot_s,
        )
        sources = [self._load(worker, generation) for worker in prefill]
        targets = [self._load(worker, generation) for worker in decode]
        return choose(asked, sources, targets, self.pairs, PairSpeed(_FASTEST["unix"]), local=local)

    def _probe(self) -> bool:
        """Whether this one is to see how the transfers that raised an alarm are now."""
        if not any(pair.alarm for pair in self.pairs.values()):
            return False
        self._since_probe = (self._since_probe + 1) % _PROBE_EVERY
        return self._since_probe == 0

    def host(self, keeper: WorkerHandle) -> WorkerHandle | None:
        """Who takes over an answer whose KV `keeper` has; None where only that one can."""
        others = [worker for worker in self.of("decode", "unified") if worker.open and worker is not keeper]
        return min(others, key=lambda worker: (worker.decoding, worker.prompt_backlog), default=None)

    def _load(self, worker: WorkerHandle, generation: Generation) -> Load[WorkerHandle]:
        state = worker.state
        return Load(
            worker=worker,
            step=worker.step,
            chunk=worker.config.prefill_chunk,
            backlog=worker.prompt_backlog,
            backlog_pairs=worker.backlog_pairs,
            decoding=worker.decoding,
            context=state.context if state else 0,
            uncached=len(generation.prompt_ids) - self.cached_tokens(worker, generation),
        )

    def _token_bytes(self) -> int:
        return next((worker.started.token_bytes for worker in self.workers if worker.started), 0)

    def pressures(self) -> list[Pressure]:
        """What the planner wants to know."""
        found = []
        for worker in self.workers:
            if not worker.open:
                continue
            lone = predicted(worker.step, StepLoad(1))
            context = worker.state.context if worker.state else 0
            step = predicted(worker.step, StepLoad(worker.decoding, context))
            found.append(
                Pressure(
                    name=worker.name,
                    role=worker.role,
                    wait_s=compute_s(worker.step, worker.prompt_backlog, worker.backlog_pairs),
                    slowdown=step / lone if lone else 1.0,
                    busy=len(worker.active),
                )
            )
        return found

    # --- transfers -----------------------------------------------------------------------------------

    def observe(self, source: WorkerHandle, target: WorkerHandle, transfer: KVTransfer, generation: Generation) -> None:
        """Learn from a hand-over, and say where an alarm begins or ends."""
        pair = self.pairs.get((source, target))
        if pair is None:
            fastest = _FASTEST["unix" if transfer.transport == "shm" else "tcp"]
            pair = self.pairs[source, target] = PairSpeed(fastest)
        hidden_s = prompt_s(source.step, 0, len(generation.prompt_ids))
        busy_s = transfer.wire_s + transfer.codec_s
        if not pair.observe(transfer.bytes, busy_s, transfer.exposed_s, hidden_s):
            return
        name, took = f"{source.name} → {target.name}", transfer.exposed_s * 1000
        if pair.alarm:
            log.warning("KV transfers %s are slow: %.0f ms now, the limit is %.0f ms", name, took, ALARM_S * 1000)
        else:
            log.warning("KV transfers %s are fast again: %.0f ms now", name, took)

    def forget(self, worker: WorkerHandle) -> None:
        """Another process will be in its place: what was measured of its transfers is void."""
        self.pairs = {pair: speed for pair, speed in self.pairs.items() if worker not in pair}
