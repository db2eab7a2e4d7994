"""How long a step will take: a + b·batch + c·context + d·prompt tokens, learned from the steps themselves."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

Coefficients = tuple[float, float, float, float]
"""a, b, c, d of the model above, in seconds; zeros while nothing is known."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes: sequences that decode, the KV tokens they read together, and prompt tokens."""

    batch: float = 0
    context: float = 0
    prompt: float = 0

    def features(self) -> tuple[float, float, float, float]:
        return (1.0, self.batch, self.context, self.prompt)


def predicted(coefficients: SequenceOf[float], load: StepLoad) -> float:
    """Seconds of a step with `load`; 0 while nothing is known."""
    return sum(w * x for w, x in zip(coefficients, load.features(), strict=True))


class StepTime:
    """Seconds of a step, by load. Knows nothing, and learns nothing, until `fit` (`ready` is False).

    `fit` takes measurements made at start; `observe` corrects by normalized least mean squares (Widrow & Hoff
    1960; each coefficient moves in proportion to its own size squared), which follows drift, needs no matrix and
    cannot blow up while the load stays the same for hours, as recursive least squares with forgetting does.
    """

    _RATE = 0.15
    _OUTLIER = 3.0
    _QUANTILE = 0.97
    _QUANTILE_RATE = 0.01

    def __init__(self) -> None:
        self._w = [0.0, 0.0, 0.0, 0.0]
        self._scale = [0.0, 0.0, 0.0, 0.0]
        self._margin = 1.05
        """The quantile of observed ÷ predicted: what a promise has to allow for beyond the mean."""
        self.ready = False

    def fit(self, measured: Iterable[tuple[StepLoad, float]]) -> None:
        """Least squares on relative errors, no coefficient below zero, by coordinate descent."""
        rows = [([x / seconds for x in load.features()]) for load, seconds in measured]
        w = [0.0, 0.0, 0.0, 0.0]
        squares = [sum(row[i] ** 2 for row in rows) for i in range(4)]
        for _ in range(2000):
            for i in range(4):
                if squares[i]:
                    rest = sum(row[i] * (1.0 - sum(w[j] * row[j] for j in range(4) if j != i)) for row in rows)
                    w[i] = max(0.0, rest / squares[i])
        self._w, self._scale = w, [value**2 for value in w]
        self.ready = True

    @property
    def coefficients(self) -> Coefficients:
        a, b, c, d = self._w
        return a, b, c, d

    def predict(self, load: StepLoad) -> float:
        """Seconds; 0 while nothing is known."""
        return predicted(self._w, load)

    def at_worst(self, load: StepLoad) -> float:
        """Seconds that 97 of 100 such steps do not exceed."""
        return self._margin * self.predict(load)

    def prompt_tokens_within(self, seconds: float, load: StepLoad) -> int:
        """How many prompt tokens fit into `seconds` beside `load`, 97 times of 100."""
        left = seconds / self._margin - self.predict(load)
        if left <= 0 or not self._w[3]:
            return 0 if left <= 0 else 1 << 30
        return int(left / self._w[3])

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took `seconds`; one the machine interrupted counts as three times the expected."""
        if not self.ready:
            return
        x = load.features()
        expected = self.predict(load)
        # Stochastic quantile tracking: up by 0.97 where it was exceeded, down by 0.03 where not.
        above = seconds > self._margin * expected
        self._margin = max(1.0, self._margin + self._QUANTILE_RATE * (above - (1.0 - self._QUANTILE)))
        error = min(seconds, self._OUTLIER * expected) - expected
        power = sum(scale * value**2 for scale, value in zip(self._scale, x, strict=True))
        if power <= 0.0:
            return
        for i in range(4):
            self._w[i] = max(0.0, self._w[i] + self._RATE * error * self._scale[i] * x[i] / power)
