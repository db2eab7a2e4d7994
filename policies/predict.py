"""What a target will do with a prompt, learned from what it did: TTFT = a + b·(uncached prompt tokens).

The line is a least-squares fit in which each new observation makes the older ones count 5% less (recursive
least squares with exponential forgetting, kept as five decayed sums, which cannot wind up or lose definiteness
as a covariance matrix does). Neither a nor b may be negative. TPOT is an exponentially weighted mean. How far
each observation lay from the prediction made before it is kept as a ratio, and the chance of meeting goals is
the share of those ratios under which this prompt would meet them, again weighted by age: a quantile of
residuals, not a mean.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from policies.model import Goals

_FORGET = 0.95
_WINDOW = 64
"""Residuals kept: the oldest one weighs 0.95^63, 4% of the newest."""
_ENOUGH = 5
"""Residuals without which a chance is not claimed."""
_TPOT_STEP = 0.1
_FLOOR_MS = 1.0
"""A ratio to less than this says nothing."""
_SPREAD = 32.0
"""Tokens by which prompt lengths must differ before a slope is believed: damps b while all are alike."""
_WEIGHTS = tuple(_FORGET**age for age in range(_WINDOW))


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one prompt at one target. `tpot_ms` is None where no answer had a measurable one."""

    ttft_ms: float
    tpot_ms: float | None
    samples: int
    """Observations in all."""
    ratios: tuple[tuple[float, float | None], ...] = field(repr=False)
    """Observed / predicted TTFT and TPOT, newest first."""

    def p_meet(self, goals: Goals) -> float | None:
        """The chance that all of `goals` are met, 0 to 1; None while too little is known to say.

        Both goals are judged on the same past answers, so that slow ones are not counted against each twice.
        """
        ttft_room = math.inf if goals.ttft_ms is None else goals.ttft_ms / max(self.ttft_ms, _FLOOR_MS)
        needs_tpot = goals.tpot_ms is not None
        if goals.tpot_ms is None or self.tpot_ms is None:
            tpot_room = math.inf
        else:
            tpot_room = goals.tpot_ms / max(self.tpot_ms, _FLOOR_MS)
        met = total = 0.0
        used = 0
        for weight, (ttft, tpot) in zip(_WEIGHTS, self.ratios, strict=False):
            if needs_tpot and tpot is None:
                continue
            used += 1
            total += weight
            if ttft <= ttft_room and (tpot is None or tpot <= tpot_room):
                met += weight
        return met / total if used >= _ENOUGH else None


class Predictor:
    """The running fit of one target. Plain arithmetic: the same observations give the same predictions."""

    __slots__ = ("_n", "_ratios", "_sx", "_sxx", "_sxy", "_sy", "_tpot_ms", "_w")

    def __init__(self) -> None:
        self._n = 0
        self._w = self._sx = self._sy = self._sxx = self._sxy = 0.0
        self._tpot_ms: float | None = None
        self._ratios: deque[tuple[float, float | None]] = deque(maxlen=_WINDOW)

    def observe(self, uncached_tokens: int, ttft_s: float, tpot_s: float | None) -> None:
        """Learn from one answer; times in seconds. Raises ValueError for what cannot be a measurement."""
        for name, value in (("uncached_tokens", uncached_tokens), ("ttft_s", ttft_s), ("tpot_s", tpot_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        x, y = float(uncached_tokens), ttft_s * 1000
        tpot_ms = None if tpot_s is None else tpot_s * 1000
        if self._n:
            ttft_ratio = y / max(self._line(x), _FLOOR_MS)
            known = tpot_ms is not None and self._tpot_ms is not None
            tpot_ratio = tpot_ms / max(self._tpot_ms, _FLOOR_MS) if known else None  # type: ignore[operator,type-var]
            self._ratios.appendleft((ttft_ratio, tpot_ratio))
        self._n += 1
        self._w = self._w * _FORGET + 1
        self._sx = self._sx * _FORGET + x
        self._sy = self._sy * _FORGET + y
        self._sxx = self._sxx * _FORGET + x * x
        self._sxy = self._sxy * _FORGET + x * y
        if tpot_ms is not None:
            before = self._tpot_ms
            self._tpot_ms = tpot_ms if before is None else before + _TPOT_STEP * (tpot_ms - before)

    def predict(self, uncached_tokens: int) -> Prediction | None:
        """None while nothing has been observed: unknown, not zero."""
        if not self._n:
            return None
        return Prediction(self._line(float(uncached_tokens)), self._tpot_ms, self._n, tuple(self._ratios))

    def _line(self, x: float) -> float:
        """The fitted TTFT in milliseconds. Called with at least one observation."""
        mean_x, mean_y = self._sx / self._w, self._sy / self._w
        variance = max(self._sxx / self._w - mean_x * mean_x, 0.0)
        slope = (self._sxy / self._w - mean_x * mean_y) / (variance + _SPREAD * _SPREAD)
        if slope <= 0:
            return mean_y
        if slope * mean_x > mean_y:
            # The best line would begin below zero: the best one that does not goes through it.
            return self._sxy / self._sxx * x
        return mean_y + slope * (x - mean_x)
