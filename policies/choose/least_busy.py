"""`least-busy`: where the fewest requests are under way.

When: several replicas of one model. Limits: it counts this router's own requests; a long one counts like a short one,
and a target that fails at once looks idle.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option, ranked


def least_busy(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By attempts under way over the rule's weight (1 where it names none)."""
    ordered = ranked(options, lambda option: _load(option, asked))
    for option in options:
        option.reason = f"{option.inflight} under way"
    first = ordered[0]
    return ordered, f"{first.target} is the least busy: {first.reason}"


def _load(option: Option, asked: Asked) -> float | None:
    weight = asked.weights.get(option.target, 1.0)
    return option.inflight / weight if weight else None
