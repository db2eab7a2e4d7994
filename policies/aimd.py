"""How many requests a target takes at once, found out: one more for as long as it keeps up, a quarter fewer when it
says that it does not (additive increase, multiplicative decrease; Chiu & Jain 1989)."""

from __future__ import annotations

OVERLOADED = frozenset({408, 429, 503, 504, 529})
"""Statuses that say so."""
_BEGIN = 8.0
_MOST = 1024.0
_CUT = 0.75
_ONCE_S = 1.0
"""Requests that fail together say one thing, not many."""


class Aimd:
    """`concurrency: auto`. Whoever tells it what time it is may use any clock."""

    __slots__ = ("_cut_at", "_limit")

    def __init__(self) -> None:
        self._limit = _BEGIN
        self._cut_at = float("-inf")

    @property
    def limit(self) -> int:
        return int(self._limit)

    def answered(self, inflight: int) -> None:
        """One was served while so many were under way: only a limit that is being reached says anything."""
        if inflight * 2 >= self._limit:
            self._limit = min(self._limit + 1 / self._limit, _MOST)

    def overloaded(self, now_s: float) -> None:
        if now_s - self._cut_at >= _ONCE_S:
            self._cut_at = now_s
            self._limit = max(1.0, self._limit * _CUT)
