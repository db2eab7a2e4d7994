"""The simulation: arrivals, decisions by the live code, and what the targets then do, in simulated time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from policies.decide import decide
from policies.errors import NoCandidate, NoRoute
from policies.model import Goals, Policy, Profile, Speed
from policies.simulate.engine import Worker
from policies.simulate.placing import place
from policies.simulate.trace import HASHED_TOKENS, Request
from policies.simulate.world import Behaviour, Workers, World
from policies.state import RouterState


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds; None where it was refused."""

    request: Request
    class_name: str
    goals: Goals
    target: str | None
    ttft_s: float | None = None
    tpot_s: float | None = None
    cost_usd: float | None = None
    load: int = 0
    """What was under way at its target when it came."""
    route: str = ""
    predicted: float | None = None
    """The chance to meet the goals that was predicted for its target."""

    @property
    def met(self) -> bool:
        """Whether it kept its goals; one without goals does where it is answered."""
        if self.ttft_s is None:
            return False
        ttft_ms, tpot_ms = self.goals.ttft_ms, self.goals.tpot_ms
        if ttft_ms is not None and self.ttft_s * 1000 > ttft_ms:
            return False
        return tpot_ms is None or self.tpot_s is None or self.tpot_s * 1000 <= tpot_ms


class _Cluster:
    """The workers of one cluster, and the prefixes they remember."""

    def __init__(self, workers: Workers, behaviour: Behaviour) -> None:
        self.prefill, self.decode = (
            [Worker(behaviour.speed, workers.chunk, workers.max_batch) for _ in range(count)]
            for count in (workers.prefill, workers.decode)
        )
        self.adaptive = workers.adaptive
        self.seen: set[int] = set()


class _Run:
    def __init__(self, policy: Policy, world: World, seed: int) -> None:
        self.policy = policy
        self.world = world
        self.state = RouterState()
        self.rng = random.Random(seed)
        self.noise = random.Random(seed + 1)
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.now = 0.0
        self.clusters: dict[str, _Cluster] = {}
        for behaviour in world.targets.values():
            name = behaviour.cluster
            if name is not None and name not in self.clusters:
                self.clusters[name] = _Cluster(world.clusters[name], behaviour)
        self.workers = [worker for one in self.clusters.values() for worker in (*one.prefill, *one.decode)]
        self.hosted = {name: behaviour.speed for name, behaviour in world.targets.items()}
        for when, name, speed in world.changes:
            self.at(when, partial(self.hosted.__setitem__, name, speed))

    def at(self, when: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.later, (when, self.count, do))

    def until(self, end: float) -> None:
        """Let everything happen that happens up to `end`."""
        while True:
            first, inside = None, math.inf
            for worker in self.workers:
                if (at := worker.next_at()) < inside:
                    first, inside = worker, at
            due = self.later[0][0] if self.later else math.inf
            when = min(inside, due)
            if when > end or when == math.inf:
                break
            self.now = when
            if first is not None and inside <= due:
                self.catch_up(first)
            else:
                heapq.heappop(self.later)[2]()
        self.now = end

    def catch_up(self, worker: Worker) -> None:
        """Bring a worker to the present."""
        for at, _, then in worker.advance(self.now):
            then(at)

    # --- a request -----------------------------------------------------------------------------------

    def arrive(self, request: Request, route: str, goals: Goals) -> Outcome:
        wanted = request.goals.stricter(goals)
        profile = Profile(
            model=request.model or route,
            prompt_tokens=request.prompt_tokens,
            exact=True,
            max_tokens=request.max_tokens,
            goals=wanted,
            stream=True,
            session=request.session,
            prefix=str(request.prefixes[0]) if request.prefixes else None,
        )
        self.state.now_s = self.now
        try:
            decision = decide(self.policy, profile, self.state, self.rng)
        except NoRoute:
            return Outcome(request, "no route", wanted, None)
        except NoCandidate as error:
            return Outcome(request, error.decision.class_name, wanted, None)
        self.state.sent(decision)
        name = decision.order[0]
        rule = self.policy.rule_at(profile.model, decision.rule)
        outcome = Outcome(
            request,
            decision.class_name,
            wanted.stricter(rule.slo.goals) if rule.slo else wanted,
            name,
            route=profile.model,
            predicted=decision.predicted(name).p_meet,
        )
        price = self.policy.targets[name].price
        outcome.cost_usd = None if price is None else price.of(request.prompt_tokens, request.output_tokens)
        if decision.choose == "spill-over" and outcome.cost_usd:
            self.state.spend((decision.route, decision.rule), outcome.cost_usd)
        outcome.load = self.state[name].begin()
        behaviour = self.world.targets[name]
        if behaviour.cluster is None:
            self._hosted(outcome, name)
        else:
            self._own(outcome, name, behaviour.speed, self.clusters[behaviour.cluster])
        return outcome

    def _finish(self, outcome: Outcome, name: str, uncached: int) -> None:
        assert outcome.ttft_s is not None
        self.state[name].end()
        self.state[name].observe(uncached, outcome.ttft_s, outcome.tpot_s, outcome.load)
        self.state.answered(outcome.route, outcome.class_name, outcome.request.output_tokens)

    def _spread(self, speed: Speed) -> float:
        sigma = speed.spread
        return math.exp(self.noise.gauss(0.0, sigma)) if sigma else 1.0

    def _hosted(self, outcome: Outcome, name: str) -> None:
        speed, request = self.hosted[name], outcome.request
        ttft_ms = speed.ttft_ms + speed.ttft_ms_per_1k * request.prompt_tokens / 1000
        outcome.ttft_s = ttft_ms / 1000 * self._spread(speed)
        more = request.output_tokens - 1
        tpot_s = speed.tpot_ms / 1000 * self._spread(speed)
        outcome.tpot_s = tpot_s if more else None
        self.at(self.now + outcome.ttft_s + more * tpot_s, lambda: self._finish(outcome, name, request.prompt_tokens))

    def _own(self, outcome: Outcome, name: str, speed: Speed, cluster: _Cluster) -> None:
        request, arrived = outcome.request, self.now
        known = 0
        for block in request.prefixes:
            if block not in cluster.seen:
                break
            known += 1
        cluster.seen.update(request.prefixes)
        cached = min(known * HASHED_TOKENS, request.prompt_tokens - 1)

        def done(at: float) -> None:
            more = request.output_tokens - 1
            if more:
                assert outcome.ttft_s is not None
                outcome.tpot_s = (at - arrived - outcome.ttft_s) / more
            self._finish(outcome, name, request.prompt_tokens - cached)

        def prefilled(at: float) -> None:
            told_s = speed.ttft_ms / 1000
            outcome.ttft_s = at - arrived + told_s
            if request.output_tokens == 1:
                self.at(at + told_s, lambda: done(self.now))
                return
            host = source if whole else min(cluster.decode, key=lambda worker: worker.streams)
            moved_s = 0.0 if whole else speed.transfer_ms_per_1k * request.prompt_tokens / 1e6

            def begin() -> None:
                self.catch_up(host)
                host.give_stream(request.output_tokens - 1, request.prompt_tokens, done)

            self.at(at + told_s + moved_s, begin)

        if cluster.adaptive:
            for worker in (*cluster.prefill, *cluster.decode):
                self.catch_up(worker)
            transfer_s = speed.transfer_ms_per_1k * request.prompt_tokens / 1e6
            source, whole = place(request, cached, cluster.prefill, cluster.decode, transfer_s)
        else:
            pool, whole = cluster.prefill or cluster.decode, not cluster.prefill
            source = min(pool, key=lambda worker: (worker.backlog_s, worker.streams))
            self.catch_up(source)
        source.give_prompt(request.prompt_tokens, cached, prefilled, self._spread(speed))


def simulate(
    policy: Policy,
    requests: Iterable[Request],
    world: World,
    *,
    route: str,
    goals: Goals | None = None,
    seed: int = 0,
    progress: Callable[[int], Any] | None = None,
) -> list[Outcome]:
    """Replay `requests`, in order of arrival; those that name no model ask for `route`. `goals` are everybody's.

    The same inputs give the same outcomes, to the last bit. `progress` is called with how many have arrived.
    """
    run = _Run(policy, world, seed)
    outcomes = []
    for number, request in enumerate(requests, 1):
        run.until(request.at_s)
        outcomes.append(run.arrive(request, route, goals or Goals()))
        if progress is not None and not number % 1000:
            progress(number)
    run.until(math.inf)
    return outcomes
