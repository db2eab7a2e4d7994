"""What the router knows of its targets right now. Mutable and for one event loop: no locks, no clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from policies.aimd import OVERLOADED, Aimd
from policies.breaker import Breaker
from policies.predict import Foreseen, Prediction, Predictor
from policies.tokens import Calibration

if TYPE_CHECKING:
    from policies.explain import Decision
    from policies.model import Forecast, Policy, Target


EXPECTED_ANSWER_TOKENS = 256
"""The length of an answer that nobody limited, until answers of its class were seen."""
_ENOUGH_ANSWERS = 5
_FORGET_ANSWERS = 0.99
_SPENDING_STEP_S = 60.0


class TargetState:
    """One target: what it has been observed to do, and what it is doing."""

    __slots__ = (
        "auto",
        "breaker",
        "context",
        "foreseen",
        "inflight",
        "passed_over",
        "predictor",
        "quota",
        "reserved",
        "tokens",
    )

    def __init__(self) -> None:
        self.predictor = Predictor()
        self.foreseen = Foreseen()
        self.tokens = Calibration()
        self.inflight = 0
        """Attempts under way."""
        self.passed_over = 0
        """Requests it could have had and others got, since it was last observed."""
        self.context: int | None = None
        """Prompt and answer in tokens, where the backend itself knows its limit; the policy's own holds too."""
        self.breaker = Breaker()
        """Of its failures."""
        self.quota = Breaker()
        """Of its refusals for too many requests; one for all targets of a quota."""
        self.reserved = 0
        """Places that are kept for requests which have waited for them."""
        self.auto = Aimd()
        """How many it takes at once, where the policy leaves that to be found out."""

    def limit(self, target: Target) -> int | None:
        """How many requests may be under way there."""
        return self.auto.limit if target.concurrency == 0 else target.concurrency

    def shut_s(self, now_s: float) -> float:
        """How long nothing may be sent there; 0 where something may."""
        breaker, quota = self.breaker, self.quota
        if not (breaker.opened or quota.opened):
            return 0.0
        return max(breaker.wait_s(now_s), quota.wait_s(now_s))

    def goes(self, now_s: float) -> tuple[bool, bool]:
        """An attempt starts; for `went` or `given_up`."""
        return self.breaker.begin(now_s), self.quota.begin(now_s)

    def went(
        self,
        now_s: float,
        probes: tuple[bool, bool],
        status: int,
        why: str = "",
        retry_after_s: float | None = None,
        began_s: float | None = None,
    ) -> None:
        """How an attempt ended that began at `began_s`; None for just now."""
        own, shared = probes
        if status in OVERLOADED:
            self.auto.overloaded(now_s)
        if status == 429:
            self.breaker.abandoned(own)
            self.quota.refused(now_s, shared, 429, "it has too many requests", retry_after_s)
        elif status >= 500 or status == 408:
            self.quota.abandoned(shared)
            if retry_after_s is None:
                self.breaker.failed(now_s, own, status, why, began_s)
            else:
                self.breaker.refused(now_s, own, status, why, retry_after_s)
        else:
            self.auto.answered(self.inflight)
            self.breaker.answered(now_s, own)
            self.quota.answered(now_s, shared)

    def given_up(self, probes: tuple[bool, bool]) -> None:
        """An attempt was cancelled for no fault of the target."""
        self.breaker.abandoned(probes[0])
        self.quota.abandoned(probes[1])

    def begin(self) -> int:
        """An attempt starts; the result is how many were under way before it, for `observe`."""
        self.inflight += 1
        return self.inflight - 1

    def end(self) -> None:
        """An attempt is over, however it ended. Raises ValueError without a begin()."""
        if not self.inflight:
            raise ValueError("end() without begin(): no attempt is under way")
        self.inflight -= 1

    def observe(
        self,
        uncached_tokens: int,
        ttft_s: float,
        tpot_s: float | None = None,
        load: int = 0,
        forecast: Forecast | None = None,
    ) -> None:
        """Learn from one answer: the prompt tokens it had to compute, its times in seconds, what `begin` gave, and what
        the target itself had expected.

        `tpot_s` is None for an answer of one token. Raises ValueError for what cannot be a measurement.
        """
        self.predictor.observe(uncached_tokens, ttft_s, tpot_s, load)
        if forecast is not None:
            self.foreseen.observe(forecast, ttft_s, tpot_s)
        self.passed_over = 0

    def saved(self) -> dict[str, Any] | None:
        """What was learned, JSON-ready; None for nothing."""
        if self.predictor.predict(1) is None:
            return None
        foreseen = self.foreseen.residuals.saved()
        return {**self.predictor.saved(), "tokens": self.tokens.saved(), "foreseen": foreseen}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError where `saved` is malformed."""
        tokens = saved.get("tokens", {})
        if not isinstance(tokens, Mapping):
            raise ValueError("the token counts are no mapping")
        self.tokens.restore(tokens)
        try:
            self.foreseen.residuals.restore(saved.get("foreseen", []))
        except TypeError as error:
            raise ValueError(f"how far forecasts were off is malformed: {error}") from None
        self.predictor.restore(saved)

    def predict(self, uncached_tokens: int) -> Prediction | None:
        """For a prompt with that many tokens to compute, as things are; None while nothing has been observed."""
        return self.predictor.predict(uncached_tokens, self.inflight)


class RouterState(dict[str, TargetState]):
    """Target name -> TargetState. Indexing makes an empty state for a new target; `get` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[tuple[str, int], int] = {}
        """Requests sent so far, by route and by the line of its rule."""
        self.now_s = 0.0
        """On any clock that only goes forward; whoever owns this sets it before decisions and spendings."""
        self._left: dict[tuple[str, int], frozenset[str]] = {}
        self._spent: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        """By rule: (when, USD), over minutes."""
        self.quotas: dict[str, Breaker] = {}
        """By name."""
        self._answers: dict[tuple[str, str], tuple[float, float]] = {}
        """By route and class: (how many answers, their tokens), each making the older ones count less."""

    def wire(self, policy: Policy) -> None:
        """Targets of one quota share its breaker, and every breaker has the policy's rule."""
        for name, target in policy.targets.items():
            known = self[name]
            known.quota = self.quotas.setdefault(target.quota or f"{target.provider}/{target.model}", known.quota)
            known.breaker.rule = known.quota.rule = policy.resilience.breaker

    def answered(self, route: str, class_name: str, tokens: int) -> None:
        """An answer had that many tokens."""
        count, total = self._answers.get((route, class_name), (0.0, 0.0))
        self._answers[route, class_name] = count * _FORGET_ANSWERS + 1, total * _FORGET_ANSWERS + tokens

    def answer_tokens(self, route: str, class_name: str, max_tokens: int | None) -> int:
        """How long the next answer is expected to be: as those before it, and no longer than its limit."""
        count, total = self._answers.get((route, class_name), (0.0, 0.0))
        if count < _ENOUGH_ANSWERS:
            return max_tokens or EXPECTED_ANSWER_TOKENS
        mean = max(1, round(total / count))
        return mean if max_tokens is None else min(mean, max_tokens)

    def saved_answers(self) -> list[list[Any]]:
        """How long answers were, JSON-ready."""
        return [[*names, *sums] for names, sums in self._answers.items()]

    def restore_answers(self, saved: Any, policy: Policy) -> None:
        """Know what `saved` said of routes that there still are. Raises ValueError."""
        answers = {}
        try:
            for route, class_name, count, total in saved:
                if not (0 < float(count) <= float(total) < float("inf")):
                    raise ValueError(f"{count!r} answers of {total!r} tokens")
                if route in policy.routes:
                    answers[str(route), str(class_name)] = float(count), float(total)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the lengths of answers are malformed: {error}") from None
        self._answers.update(answers)

    def saved(self, policy: Policy) -> dict[str, Any]:
        """What was learned of the policy's targets, JSON-ready."""
        return {
            name: {"provider": target.provider, "model": target.model, "learned": learned}
            for name, target in policy.targets.items()
            if name in self and (learned := self[name].saved()) is not None
        }

    def restore(self, saved: Mapping[str, Any], policy: Policy) -> list[str]:
        """Know what `saved` said of targets that are still the same; their names. Raises ValueError."""
        known = []
        for name, target in policy.targets.items():
            one = saved.get(name)
            if isinstance(one, Mapping) and (one.get("provider"), one.get("model")) == (target.provider, target.model):
                if not isinstance(one.get("learned"), Mapping):
                    raise ValueError(f"what was learned of {name!r} is missing")
                self[name].restore(one["learned"])
                known.append(name)
        return known

    def left(self, rule: tuple[str, int]) -> frozenset[str]:
        """The targets that `rule` (its route and line) has spilled over from."""
        return self._left.get(rule, frozenset())

    def spend(self, rule: tuple[str, int], usd: float) -> None:
        """An answer of that rule cost so much."""
        spent = self._spent.setdefault(rule, deque())
        if spent and self.now_s - spent[-1][0] < _SPENDING_STEP_S:
            at, before = spent.pop()
            spent.append((at, before + usd))
        else:
            spent.append((self.now_s, usd))
        while spent[0][0] <= self.now_s - 3600:
            spent.popleft()

    def spent_usd(self, rule: tuple[str, int]) -> float:
        """In the last hour."""
        since = self.now_s - 3600
        return sum(usd for at, usd in self._spent.get(rule, ()) if at > since)

    def sent(self, decision: Decision) -> None:
        """A decision is carried out."""
        rule = (decision.route, decision.rule)
        self.turns[rule] = self.turns.get(rule, 0) + 1
        if decision.choose == "spill-over":
            self._left[rule] = decision.left
        for name in decision.order[1:]:
            self[name].passed_over += 1
        self[decision.order[0]].passed_over = 0

    def __missing__(self, target: str) -> TargetState:
        return self.setdefault(target, TargetState())
