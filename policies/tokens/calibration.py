"""How a target counts what we estimate, learned from the usage that it reports.

By kind of text, because a vocabulary that is thrifty with English may be wasteful with Chinese. Sums in which each
answer makes the older ones count less; a kind that was not seen yet counts as all others together did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.tokens.text import Estimate

_FORGET = 0.97
_PRIOR = 300.0
"""So many tokens are believed to be as estimated before anything is learned."""
_MOST = 4.0
"""A count further off than this factor has other reasons than the vocabulary."""


class Calibration:
    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        """By kind: (tokens counted, tokens estimated)."""

    def learn(self, estimate: Estimate, counted: int) -> None:
        if not estimate.tokens or not estimate.tokens / _MOST <= counted <= estimate.tokens * _MOST:
            return
        before = self._sums.get(estimate.kind, (0.0, 0.0))
        self._sums[estimate.kind] = before[0] * _FORGET + counted, before[1] * _FORGET + estimate.tokens

    def corrected(self, estimate: Estimate) -> int:
        """The tokens that the target will count."""
        if not self._sums:
            return estimate.tokens
        counted = _PRIOR + sum([one for one, _ in self._sums.values()])
        pooled = counted / (_PRIOR + sum([one for _, one in self._sums.values()]))
        own = self._sums.get(estimate.kind)
        factor = pooled if own is None else (own[0] + _PRIOR * pooled) / (own[1] + _PRIOR)
        return max(1, round(estimate.tokens * factor))

    def saved(self) -> dict[str, list[float]]:
        return {kind: list(sums) for kind, sums in self._sums.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError where `saved` is malformed."""
        sums = {}
        for kind, pair in saved.items():
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, int | float) for one in pair)):
                raise ValueError(f"the token counts of kind {kind!r} are not two numbers")
            if not 0 <= pair[1] < float("inf") or not 0 <= pair[0] < float("inf"):
                raise ValueError(f"the token counts of kind {kind!r} are not amounts")
            sums[kind] = (float(pair[0]), float(pair[1]))
        self._sums = sums
