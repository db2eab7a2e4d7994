"""How long a step will take: a + b·batch + c·context + d·prompt + e·pairs, learned from the steps themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

Coefficients = tuple[float, float, float, float, float]
"""a to e of the model above, in seconds; zeros while nothing is known."""
UNKNOWN: Coefficients = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes: sequences that decode, the KV tokens they read together, prompt tokens, and the pairs of
    those and the tokens before them, which attention computes."""

    batch: float = 0
    context: float = 0
    prompt: float = 0
    pairs: float = 0

    def features(self) -> Coefficients:
        return (1.0, self.batch, self.context, self.prompt, self.pairs)


def pairs(start: float, length: float) -> float:
    """Those of `length` tokens of a prompt of which `start` are computed already."""
    return length * (start + length / 2)


def compute_s(coefficients: Coefficients, tokens: float, pairs: float) -> float:
    """Seconds that so much of prompts adds to the steps it is in."""
    return coefficients[3] * tokens + coefficients[4] * pairs


def prompt_s(coefficients: Coefficients, start: float, length: float) -> float:
    """The same for `length` tokens of one prompt, of which `start` are there already."""
    return compute_s(coefficients, length, pairs(start, length))


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
        self._w = list(UNKNOWN)
        self._scale = list(UNKNOWN)
        self._margin = 1.05
        """The quantile of observed ÷ predicted: what a promise has to allow for beyond the mean."""
        self.ready = False

    def fit(self, measured: Iterable[tuple[StepLoad, float]]) -> None:
        """Least squares on relative errors, no coefficient below zero, by coordinate descent."""
        rows = [([x / seconds for x in load.features()]) for load, seconds in measured]
        count = len(UNKNOWN)
        w = list(UNKNOWN)
        squares = [sum(row[i] ** 2 for row in rows) for i in range(count)]
        for _ in range(2000):
            for i in range(count):
                if squares[i]:
                    rest = sum(row[i] * (1.0 - sum(w[j] * row[j] for j in range(count) if j != i)) for row in rows)
                    w[i] = max(0.0, rest / squares[i])
        self._w, self._scale = w, [value**2 for value in w]
        self.ready = True

    @property
    def coefficients(self) -> Coefficients:
        a, b, c, d, e = self._w
        return a, b, c, d, e

    def predict(self, load: StepLoad) -> float:
        """Seconds; 0 while nothing is known."""
        return predicted(self._w, load)

    def at_worst(self, load: StepLoad) -> float:
        """Seconds that 97 of 100 such steps do not exceed."""
        return self._margin * self.predict(load)

    def prompt_tokens_within(self, seconds: float, load: StepLoad, start: int = 0) -> int:
        """How many tokens of a prompt, of which `start` are computed, fit into `seconds` beside `load`, 97 times of
        100."""
        left = seconds / self._margin - self.predict(load)
        _, _, _, d, e = self._w
        slope = d + e * start
        if left <= 0 or not slope:
            return 0 if left <= 0 else 1 << 30
        # left = slope·n + e/2·n², solved so that a small e does not cancel
        return int(2 * left / (slope + math.sqrt(slope * slope + 2 * e * left)))

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
        for i in range(len(x)):
            self._w[i] = max(0.0, self._w[i] + self._RATE * error * self._scale[i] * x[i] / power)
