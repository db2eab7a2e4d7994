"""What the router knows of its targets right now. Mutable and for one event loop: no locks, no clock, no I/O."""

from __future__ import annotations

from policies.predict import Prediction, Predictor


class TargetState:
    """One target: what it has been observed to do, and what it is doing."""

    __slots__ = ("_predictor", "context", "inflight")

    def __init__(self) -> None:
        self._predictor = Predictor()
        self.inflight = 0
        """Attempts under way."""
        self.context: int | None = None
        """Prompt and answer in tokens, where the backend itself knows its limit; the policy's own holds too."""

    def begin(self) -> None:
        """An attempt starts."""
        self.inflight += 1

    def end(self) -> None:
        """An attempt is over, however it ended. Raises ValueError without a begin()."""
        if not self.inflight:
            raise ValueError("end() without begin(): no attempt is under way")
        self.inflight -= 1

    def observe(self, uncached_tokens: int, ttft_s: float, tpot_s: float | None = None) -> None:
        """Learn from one answer: the prompt tokens it had to compute, and its times in seconds.

        `tpot_s` is None for an answer of one token. Raises ValueError for what cannot be a measurement.
        """
        self._predictor.observe(uncached_tokens, ttft_s, tpot_s)

    def predict(self, uncached_tokens: int) -> Prediction | None:
        """For a prompt with that many tokens to compute; None while nothing has been observed."""
        return self._predictor.predict(uncached_tokens)


class RouterState(dict[str, TargetState]):
    """Target name -> TargetState. Indexing makes an empty state for a new target; `get` does not."""

    def __missing__(self, target: str) -> TargetState:
        return self.setdefault(target, TargetState())
