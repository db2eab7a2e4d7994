"""Everything that requests share: the policy, its backends, what was observed, and the decision."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from backends.base import Backend, BackendError, PromptCount
from backends.base import Goals as BackendGoals
from backends.dialects import count
from policies import (
    WEEKDAYS,
    Estimate,
    Forecast,
    NoCandidate,
    NoRoute,
    Policy,
    Profile,
    RouterState,
    decide,
    estimate_prompt_tokens,
    needs_of,
    prefix_of,
)
from router.answer import Answer
from router.errors import RouterError
from router.hedging import HedgeBudget
from router.incoming import Incoming
from router.ledger import Ledger
from router.mirroring import Mirrors
from router.overrides import FIELD, check_allowed
from router.queueing import Queues

if TYPE_CHECKING:
    from policies import Decision


_REFUSED_BY = {
    "cooling": ("targets_cooling_down", None),
    "busy": ("target_busy", None),
    "budget": ("budget_exhausted", None),
    "context": ("context_length_exceeded", "messages"),
    "needs": ("unsupported_parameter", None),
    "overrides": ("no_candidate", FIELD),
}
"""(code, param) of the refusal, by what candidates failed by: that of the one that came nearest."""


_LATER = {"target_busy": 503, "budget_exhausted": 429}
"""Their statuses, where those are fixed."""
_OF_THE_MOMENT = frozenset({"cooling", "busy", "budget"})
"""Refusals that say nothing of the request."""


class Executor:
    """Everything a request needs; one for the SDK and the gateway. Requests keep the one they began with, and so its
    policy, when another takes its place."""

    def __init__(self, policy: Policy, backends: Mapping[str, Backend], before: Executor | None = None) -> None:
        """What `before` has observed of targets that are still the same is kept."""
        self.policy = policy
        self.backends = backends
        self.state = RouterState()
        self.ledger: Ledger = Ledger() if before is None else before.ledger
        self._rng: random.Random = random.Random() if before is None else before._rng
        self.mirrors = Mirrors(self)
        self.hedges: dict[str, HedgeBudget] = {}
        """By route."""
        self._under_way: set[Answer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        if before is not None:
            for name, target in policy.targets.items():
                old = before.policy.targets.get(name)
                same = old is not None and (old.provider, old.model) == (target.provider, target.model)
                if same and backends.get(target.provider) is before.backends.get(target.provider):
                    self.state[name] = before.state[name]
            self.state.restore_answers(before.state.saved_answers(), policy)
            self.state.quotas = before.state.quotas
            self.hedges = before.hedges
        self.state.wire(policy)
        self.queues = Queues(policy, self.state)
        self.queues.shed = lambda why: self.ledger.metrics.shed.inc()
        self._timezone = ZoneInfo(policy.timezone)
        self._targets = {
            route: list(dict.fromkeys(name for rule in rules for name in rule.targets))
            for route, rules in policy.routes.items()
        }
        self._by_prefix = any(rule.choose == "prefix-affinity" for rules in policy.routes.values() for rule in rules)

    # --- decision ------------------------------------------------------------------------------------

    def profile(self, incoming: Incoming) -> tuple[Profile, dict[str, PromptCount], dict[str, BackendError]]:
        """The request's profile; the token ids, by provider, of those that count exactly; and who refused it."""
        check_allowed(incoming.asked, incoming.overrides, self.policy, incoming.key)
        counts: dict[str, PromptCount] = {}
        refusals: dict[str, BackendError] = {}
        tokens_by_target: dict[str, int] = {}
        for name in self._targets_of(incoming.model):
            provider = self.policy.targets[name].provider
            backend = self.backends[provider]
            if provider not in counts and provider not in refusals:
                try:
                    counted = count(backend, incoming.surface, incoming.body)
                except BackendError as error:
                    refusals[provider] = error
                    continue
                if counted is None:
                    continue
                counts[provider] = counted
            if provider in counts:
                tokens_by_target[name] = counts[provider].tokens
            self.state[name].context = backend.context_limit()
        exact = next(iter(tokens_by_target.values()), None)
        forecasts = self._forecasts(incoming, counts)
        estimate = self._estimate(incoming, tokens_by_target)
        now = datetime.now(self._timezone)
        metadata = incoming.body.get("metadata")
        profile = Profile(
            model=incoming.model,
            prompt_tokens=exact or (estimate.tokens if estimate is not None else 1),
            exact=exact is not None,
            max_tokens=incoming.max_tokens,
            goals=incoming.goals,
            stream=incoming.stream,
            priority=incoming.priority,
            needs=needs_of(incoming.body),
            metadata=metadata if isinstance(metadata, Mapping) else {},
            headers=incoming.headers,
            hour=now.hour + now.minute / 60,
            weekday=WEEKDAYS[now.weekday()],
            overrides=incoming.overrides,
            session=incoming.session,
            key=incoming.key,
            prefix=prefix_of(incoming.surface, incoming.body) if self._by_prefix else None,
            tokens_by_target=tokens_by_target,
            forecasts=forecasts,
            uncached_tokens=min([one.uncached_tokens for one in forecasts.values()], default=None),
            estimate=estimate,
        )
        return profile, counts, refusals

    def _forecasts(self, incoming: Incoming, counts: Mapping[str, PromptCount]) -> dict[str, Forecast]:
        """By target, where its backend makes any."""
        found: dict[str, Forecast] = {}
        for name in self._targets_of(incoming.model):
            provider = self.policy.targets[name].provider
            if provider in counts:
                goals = BackendGoals(incoming.goals.ttft_ms, incoming.goals.tpot_ms)
                foreseen = self.backends[provider].forecast(counts[provider], incoming.max_tokens, goals)
                if foreseen is not None:
                    found[name] = Forecast(foreseen.uncached_tokens, foreseen.ttft_s * 1000, foreseen.tpot_s * 1000)
        return found

    def _estimate(self, incoming: Incoming, tokens_by_target: dict[str, int]) -> Estimate | None:
        """None where every target counts exactly. Those that do not get what they are expected to count."""
        estimate = None
        for name in self._targets_of(incoming.model):
            if name not in tokens_by_target:
                estimate = estimate or estimate_prompt_tokens(incoming.surface, incoming.body)
                tokens_by_target[name] = self.state[name].tokens.corrected(estimate)
        return estimate

    def _targets_of(self, route: str) -> list[str]:
        """The targets of a route in the order its rules name them."""
        return self._targets.get(route, [])

    def choose(self, profile: Profile) -> Decision:
        """Decide, and take note that it is carried out. Raises RouterError."""
        decision = self._decide(profile, self._rng)
        self.state.sent(decision)
        return decision

    def decide(self, profile: Profile) -> Decision:
        """What `choose` would decide now. Raises RouterError."""
        same = random.Random()
        same.setstate(self._rng.getstate())
        return self._decide(profile, same)

    def _decide(self, profile: Profile, rng: random.Random) -> Decision:
        """Raises RouterError where no route or no candidate can take the request."""
        try:
            self.state.now_s = time.monotonic()
            return decide(self.policy, profile, self.state, rng)
        except NoRoute as error:
            raise RouterError(str(error), status=404, code="model_not_found", param="model") from None
        except NoCandidate as error:
            kind = next(kind for kind in _REFUSED_BY if kind in error.kinds)
            code, param = _REFUSED_BY[kind]
            why = [dropped for dropped in error.why.values() if dropped.kind == kind]
            # Where all that cool down have had too many requests, so has the client; else somebody is broken.
            status = why[0].status if len({dropped.status for dropped in why}) == 1 else 503
            waits = [dropped.wait_s for dropped in why if dropped.wait_s is not None]
            raise RouterError(
                str(error),
                status=_LATER.get(code, 429 if status == 429 else 503) if kind in _OF_THE_MOMENT else 400,
                code=code,
                param=param,
                decision=error.decision,
                retry_after_s=min(waits, default=None),
            ) from None

    async def admitted(self, profile: Profile, deadline: float) -> Decision:
        """`choose`, waiting for a place where every target that could take the request is full and has a queue.
        Raises RouterError."""
        while True:
            try:
                return self.choose(profile)
            except RouterError as refused:
                if refused.code != "target_busy" or refused.decision is None:
                    raise
                decision = refused.decision
                full = self._full(decision)
                if not full:
                    raise
            goal_ms = profile.goals.ttft_ms
            begin_by = deadline if goal_ms is None else time.monotonic() + goal_ms / 1000
            self.ledger.metrics.queued.inc()
            try:
                await self.queues.wait(full, self.policy.priority_of(decision.class_name, profile), begin_by, deadline)
            except RouterError as turned_away:
                turned_away.decision = decision
                raise
            finally:
                self.ledger.metrics.queued.dec()

    def _full(self, decision: Decision) -> frozenset[str]:
        """Those with a queue among its candidates that are full."""
        found = set()
        for candidate in decision.candidates:
            target = self.policy.targets[candidate.target]
            limit = self.state[target.name].limit(target)
            if target.queue and limit is not None and self.state[target.name].inflight >= limit:
                found.add(target.name)
        return frozenset(found)

    def freed(self, target: str, held_s: float | None = None) -> None:
        """A request left `target`, having been there for so long."""
        self.queues.freed(target, held_s)

    def budget_of(self, route: str) -> HedgeBudget:
        return self.hedges.setdefault(route, HedgeBudget())

    # --- attempts ------------------------------------------------------------------------------------

    async def run(self, incoming: Incoming) -> Answer:
        """The answer, once its first content (streamed) or all of it is there. Raises RouterError."""
        answer = Answer(self, incoming)
        self._under_way.add(answer)
        self._idle.clear()
        self.ledger.metrics.in_flight.inc()
        try:
            await answer.start()
        except BaseException as error:
            await answer.close(error)
            raise
        return answer

    def left(self, answer: Answer) -> None:
        """A request is over."""
        self._under_way.discard(answer)
        if not self._under_way:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until nothing is under way; copies for mirrors are given up."""
        await self._idle.wait()
        await self.mirrors.aclose()
