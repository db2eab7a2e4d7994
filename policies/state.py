"""What the router knows of its targets right now. Mutable and for one event loop: no locks, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from policies.predict import Prediction, Predictor

if TYPE_CHECKING:
    from policies.explain import Decision
    from policies.model import Policy


class TargetState:
    """One target: what it has been observed to do, and what it is doing."""

    __slots__ = ("_predictor", "context", "inflight", "passed_over")

    def __init__(self) -> None:
        self._predictor = Predictor()
        self.inflight = 0
        """Attempts under way."""
        self.passed_over = 0
        """Requests it could have had and others got, since it was last observed."""
        self.context: int | None = None
        """Prompt and answer in tokens, where the backend itself knows its limit; the policy's own holds too."""

    def begin(self) -> int:
        """An attempt starts; the result is how many were under way before it, for `observe`."""
        self.inflight += 1
        return self.inflight - 1

    def end(self) -> None:
        """An attempt is over, however it ended. Raises ValueError without a begin()."""
        if not self.inflight:
            raise ValueError("end() without begin(): no attempt is under way")
        self.inflight -= 1

    def observe(self, uncached_tokens: int, ttft_s: float, tpot_s: float | None = None, load: int = 0) -> None:
        """Learn from one answer: the prompt tokens it had to compute, its times in seconds, and what `begin` gave.

        `tpot_s` is None for an answer of one token. Raises ValueError for what cannot be a measurement.
        """
        self._predictor.observe(uncached_tokens, ttft_s, tpot_s, load)
        self.passed_over = 0

    def saved(self) -> dict[str, Any] | None:
        """What was learned, JSON-ready; None for nothing."""
        return self._predictor.saved() if self._predictor.predict(1) is not None else None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError where `saved` is malformed."""
        self._predictor.restore(saved)

    def predict(self, uncached_tokens: int) -> Prediction | None:
        """For a prompt with that many tokens to compute, as things are; None while nothing has been observed."""
        return self._predictor.predict(uncached_tokens, self.inflight)


class RouterState(dict[str, TargetState]):
    """Target name -> TargetState. Indexing makes an empty state for a new target; `get` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[tuple[str, int], int] = {}
        """Requests sent so far, by route and by the line of its rule."""

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

    def sent(self, decision: Decision) -> None:
        """A decision is carried out."""
        rule = (decision.route, decision.rule)
        self.turns[rule] = self.turns.get(rule, 0) + 1
        for name in decision.order[1:]:
            self[name].passed_over += 1
        self[decision.order[0]].passed_over = 0

    def __missing__(self, target: str) -> TargetState:
        return self.setdefault(target, TargetState())
