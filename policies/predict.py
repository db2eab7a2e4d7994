"""What a target will do with a prompt, learned from what it did.

TTFT = a + b·(uncached prompt tokens) + c·(requests under way there), TPOT = a + b·(requests under way): what waits in
a queue shows in c, so a target that is slow when crowded is expected to be fast again when it is not. Both are
least-squares fits in which each new observation makes the older ones count 5% less (recursive least squares with
exponential forgetting, kept as decayed sums, which cannot wind up or lose definiteness as a covariance matrix does).
None of the coefficients may be negative. How far each observation lay from the prediction made before it is kept as a
ratio, and the chance of meeting goals is the share of those ratios under which this prompt would meet them, again
weighted by age: a quantile of residuals, not a mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from itertools import accumulate, islice
from typing import Any, NamedTuple

from policies.model import Forecast, Goals

_FORGET = 0.95
_WINDOW = 64
"""Residuals kept: the oldest one weighs 0.95^63, 4% of the newest."""
_SURPRISES = 3
"""So many answers in a row that are all rarely slow, or all rarely fast, mean that the target has changed."""
_CLEARLY = 1.05
"""By how much they must lie beyond what was rare."""
_KNOWN = 16
"""Residuals without which nothing is rare."""
_ENOUGH = 5
"""Residuals without which a chance is not claimed."""
_FLOOR_MS = 1.0
"""A ratio to less than this says nothing."""
_SPREAD = 32.0
"""Tokens by which prompt lengths must differ before a slope is believed: damps b while all are alike."""
_LOAD_SPREAD = 0.5
"""The same for requests under way."""
_WEIGHTS = tuple(_FORGET**age for age in range(_WINDOW))


class Residuals:
    """How far observations lay from what was predicted for them: observed / predicted TTFT and TPOT, newest first."""

    __slots__ = ("_by_ttft", "ratios")

    def __init__(self) -> None:
        self.ratios: deque[tuple[float, float | None]] = deque(maxlen=_WINDOW)
        self._by_ttft: tuple[list[float], list[float]] | None = None
        """TTFT ratios, the smallest first, and the weight of those up to each."""

    def add(self, ttft: float, tpot: float | None) -> None:
        self.ratios.appendleft((ttft, tpot))
        self._by_ttft = None

    def forget_newest(self, count: int) -> None:
        for _ in range(count):
            self.ratios.popleft()
        self._by_ttft = None

    def share(self, ttft_room: float, tpot_room: float | None) -> float | None:
        """The share, by age, of those within both; None while there are too few. `tpot_room` None: any."""
        if len(self.ratios) < _ENOUGH:
            return None
        if tpot_room is None:
            ratios, weights = self._by_ttft or self._sorted()
            within = bisect_right(ratios, ttft_room)
            return weights[within - 1] / weights[-1] if within else 0.0
        met = total = 0.0
        used = 0
        for weight, (ttft, tpot) in zip(_WEIGHTS, self.ratios, strict=False):
            if tpot is None:
                continue
            used += 1
            total += weight
            if ttft <= ttft_room and tpot <= tpot_room:
                met += weight
        return met / total if used >= _ENOUGH else None

    def saved(self) -> list[list[float | None]]:
        return [list(ratio) for ratio in self.ratios]

    def restore(self, saved: Any) -> None:
        """Raises ValueError or TypeError where `saved` is malformed."""
        ratios = [(_finite(ttft), None if tpot is None else _finite(tpot)) for ttft, tpot in saved]
        for ttft, tpot in reversed(ratios[:_WINDOW]):
            self.add(ttft, tpot)

    def median(self) -> float:
        """Of observed / predicted TTFT; 1 while nothing was observed."""
        return self.quantile(0.5) if self.ratios else 1.0

    def quantile(self, share: float) -> float:
        """What observed / predicted TTFT exceeds in no more than 1 - `share` of cases. Called with at least one."""
        ratios, weights = self._by_ttft or self._sorted()
        return ratios[min(bisect_left(weights, weights[-1] * share), len(ratios) - 1)]

    @property
    def enough(self) -> bool:
        """Whether a quantile is worth claiming."""
        return len(self.ratios) >= _ENOUGH

    def _sorted(self) -> tuple[list[float], list[float]]:
        pairs = sorted(zip((ttft for ttft, _ in self.ratios), _WEIGHTS, strict=False))
        self._by_ttft = [ratio for ratio, _ in pairs], list(accumulate(weight for _, weight in pairs))
        return self._by_ttft


class Prediction(NamedTuple):
    """For one prompt at one target. `tpot_ms` is None where no answer had a measurable one."""

    ttft_ms: float
    tpot_ms: float | None
    samples: int
    """Observations in all."""
    residuals: Residuals

    def p_meet(self, goals: Goals) -> float | None:
        """The chance that all of `goals` are met, 0 to 1; None while too little is known to say.

        Both goals are judged on the same past answers, so that slow ones are not counted against each twice.
        """
        ttft_ms = self.ttft_ms if self.ttft_ms > _FLOOR_MS else _FLOOR_MS
        ttft_room = math.inf if goals.ttft_ms is None else goals.ttft_ms / ttft_ms
        if goals.tpot_ms is None:
            return self.residuals.share(ttft_room, None)
        return self.residuals.share(
            ttft_room, math.inf if self.tpot_ms is None else goals.tpot_ms / max(self.tpot_ms, _FLOOR_MS)
        )


Expected = tuple[float | None, float | None, float | None]
"""(TTFT in ms, TPOT in ms, chance to meet the goals), each None where nothing is known of it."""


class _Fit:
    """y ≈ a + b·x + c·z, none of them negative, newer observations counting more: decayed sums, solved when asked."""

    __slots__ = ("_s", "_spread", "line")

    def __init__(self, spread: tuple[float, float]) -> None:
        self._spread = spread
        """How much x and z must differ before a slope is believed: damps slopes while all are alike."""
        self._s = [0.0] * 9
        """Decayed sums of 1, x, z, y, xx, xz, zz, xy, zy."""
        self.line: tuple[float, float, float] | None = None
        """a, b and c, where they are known already."""

    @property
    def sums(self) -> list[float]:
        return list(self._s)

    def restore(self, sums: list[float]) -> None:
        self._s, self.line = list(sums), None

    def add(self, x: float, z: float, y: float) -> None:
        for index, value in enumerate((1.0, x, z, y, x * x, x * z, z * z, x * y, z * y)):
            self._s[index] = self._s[index] * _FORGET + value
        self.line = None

    def at(self, x: float, z: float) -> float:
        """Called with at least one observation."""
        a, b, c = self.line or self.solve()
        return a + b * x + c * z

    def solve(self) -> tuple[float, float, float]:
        self.line = line = self._best()
        return line

    def _best(self) -> tuple[float, float, float]:
        w, sx, sz, sy, sxx, sxz, szz, sxy, szy = self._s
        mx, mz, my = sx / w, sz / w, sy / w
        b, c = _not_negative(
            max(sxx / w - mx * mx, 0.0) + self._spread[0] ** 2,
            sxz / w - mx * mz,
            max(szz / w - mz * mz, 0.0) + self._spread[1] ** 2,
            sxy / w - mx * my,
            szy / w - mz * my,
        )
        a = my - b * mx - c * mz
        if a >= 0:
            return a, b, c
        # The best line would begin below zero: the best one that does not goes through it.
        b, c = _not_negative(sxx, sxz, szz, sxy, szy)
        return 0.0, b, c


def _not_negative(xx: float, xz: float, zz: float, xy: float, zy: float) -> tuple[float, float]:
    """Least squares of two slopes, neither below zero, from the sums of products."""
    determinant = xx * zz - xz * xz
    if determinant > 1e-12 * xx * zz:
        b, c = (xy * zz - zy * xz) / determinant, (zy * xx - xy * xz) / determinant
        if b >= 0 and c >= 0:
            return b, c
    alone_b, alone_c = max(0.0, xy / xx) if xx else 0.0, max(0.0, zy / zz) if zz else 0.0
    # Of the two ways to leave one out, the one that explains more.
    return (alone_b, 0.0) if alone_b * xy >= alone_c * zy else (0.0, alone_c)


class Predictor:
    """The running fit of one target. Plain arithmetic: the same observations give the same predictions."""

    __slots__ = ("_n", "_newest", "_residuals", "_tpot", "_tpots", "_ttft")

    def __init__(self) -> None:
        self._n = 0
        self._newest: deque[tuple[float, float, float, float | None]] = deque(maxlen=_SURPRISES)
        """The latest observations: uncached tokens, load, TTFT and TPOT in milliseconds."""
        self._residuals = Residuals()
        self._start()

    def _start(self) -> None:
        self._ttft, self._tpot, self._tpots = _Fit((_SPREAD, _LOAD_SPREAD)), _Fit((_LOAD_SPREAD, 1.0)), 0

    def observe(self, uncached_tokens: int, ttft_s: float, tpot_s: float | None, load: int = 0) -> None:
        """Learn from one answer; times in seconds, `load` what was under way when it began. Raises ValueError for what
        cannot be a measurement."""
        for name, value in (("uncached_tokens", uncached_tokens), ("ttft_s", ttft_s), ("tpot_s", tpot_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        seen = (float(uncached_tokens), float(load), ttft_s * 1000, None if tpot_s is None else tpot_s * 1000)
        if self._n:
            x, z, ttft_ms, tpot_ms = seen
            tpot_ratio = None
            if tpot_ms is not None and self._tpots:
                tpot_ratio = tpot_ms / max(self._tpot.at(z, 0.0), _FLOOR_MS)
            self._residuals.add(ttft_ms / max(self._ttft.at(x, z), _FLOOR_MS), tpot_ratio)
        self._n += 1
        self._newest.append(seen)
        if self._has_changed():
            # It is another target now: only what it did since counts. How it scatters about its line stays known.
            self._residuals.forget_newest(_SURPRISES)
            self._start()
            for one in self._newest:
                self._add(*one)
            self._newest.clear()
        else:
            self._add(*seen)

    def _add(self, x: float, z: float, ttft_ms: float, tpot_ms: float | None) -> None:
        self._ttft.add(x, z, ttft_ms)
        if tpot_ms is not None:
            self._tpots += 1
            self._tpot.add(z, 0.0, tpot_ms)

    def _has_changed(self) -> bool:
        """Whether the latest observations all lie where one in twenty did before, on the same side."""
        ratios = self._residuals.ratios
        if len(self._newest) < _SURPRISES or len(ratios) < _SURPRISES + _KNOWN:
            return False
        newest = [ttft for ttft, _ in islice(ratios, _SURPRISES)]
        before = sorted(ttft for ttft, _ in islice(ratios, _SURPRISES, None))
        rare = max(1, len(before) // 20)
        return min(newest) > _CLEARLY * before[-rare] or max(newest) * _CLEARLY < before[rare - 1]

    def saved(self) -> dict[str, Any]:
        """Everything it has learned, JSON-ready."""
        return {
            "n": self._n,
            "tpots": self._tpots,
            "ttft": self._ttft.sums,
            "tpot": self._tpot.sums,
            "ratios": self._residuals.saved(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Know what `saved` said. Raises ValueError, and then knows what it did before, where that is malformed."""
        try:
            sums = {name: [_finite(value) for value in saved[name]] for name in ("ttft", "tpot")}
            counts = {name: int(_finite(saved[name])) for name in ("n", "tpots")}
            residuals = Residuals()
            residuals.restore(saved["ratios"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not what a predictor saved: {error}") from None
        if any(len(one) != len(self._ttft.sums) for one in sums.values()) or counts["n"] < 1 or sums["ttft"][0] <= 0:
            raise ValueError("not what a predictor saved: sums are missing")
        if counts["tpots"] and sums["tpot"][0] <= 0:
            raise ValueError("not what a predictor saved: sums of TPOT are missing")
        self._n, self._tpots = counts["n"], counts["tpots"]
        self._ttft.restore(sums["ttft"])
        self._tpot.restore(sums["tpot"])
        self._newest.clear()
        self._residuals = residuals

    def predict(self, uncached_tokens: int, load: int = 0) -> Prediction | None:
        """With `load` requests under way. None while nothing has been observed: unknown, not zero."""
        if not self._n:
            return None
        tpot_ms = self._tpot.at(load, 0.0) if self._tpots else None
        return Prediction(self._ttft.at(uncached_tokens, load), tpot_ms, self._n, self._residuals)

    def expect(self, uncached_tokens: int, load: int, goals: Goals) -> Expected:
        """What `predict` says, and `p_meet` of it where there are goals: (TTFT in ms, TPOT in ms, chance). In one call,
        because it is made for every candidate of every request."""
        if not self._n:
            return None, None, None
        fit = self._ttft
        a, b, c = fit.line or fit.solve()
        ttft_ms = a + b * uncached_tokens + c * load
        tpot_ms = None
        if self._tpots:
            fit = self._tpot
            a, b, _ = fit.line or fit.solve()
            tpot_ms = a + b * load
        if goals.tpot_ms is not None or goals.ttft_ms is None:
            chance = Prediction(ttft_ms, tpot_ms, self._n, self._residuals).p_meet(goals) if goals else None
        else:
            room = goals.ttft_ms / (ttft_ms if ttft_ms > _FLOOR_MS else _FLOOR_MS)
            chance = self._residuals.share(room, None)
        return ttft_ms, tpot_ms, chance


class Foreseen:
    """How far a target's own forecasts were off, and the chances that follows from that."""

    __slots__ = ("residuals",)

    def __init__(self) -> None:
        self.residuals = Residuals()

    def observe(self, forecast: Forecast, ttft_s: float, tpot_s: float | None) -> None:
        tpot = None if tpot_s is None else tpot_s * 1000 / max(forecast.tpot_ms, _FLOOR_MS)
        self.residuals.add(ttft_s * 1000 / max(forecast.ttft_ms, _FLOOR_MS), tpot)

    def expect(self, forecast: Forecast, goals: Goals) -> Expected:
        """As `Predictor.expect`. The times are the forecast's, corrected by the median of what came instead."""
        residuals = self.residuals
        chance = Prediction(forecast.ttft_ms, forecast.tpot_ms, 0, residuals).p_meet(goals) if goals else None
        return forecast.ttft_ms * residuals.median(), forecast.tpot_ms, chance


def _finite(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is no number")
    return number
