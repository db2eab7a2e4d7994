"""`highest-throughput`: whoever is predicted to give the most tokens per second once it has begun.

When: long answers that somebody reads or a program waits for. Limits: neither the time to the first token nor cost
plays a part.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option, ranked


def highest_throughput(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By predicted, else declared time per token; those of which nothing is known come last."""
    ordered = ranked(options, lambda option: option.likely_tpot_ms)
    for option in options:
        tpot_ms = option.likely_tpot_ms
        option.reason = (
            "tokens per second unknown" if not tpot_ms else f"{1000 / tpot_ms:.0f} tokens per second expected"
        )
    first = ordered[0]
    if first.likely_tpot_ms is None:
        return ordered, f"{first.target} is first in the policy's order, as nobody's throughput is known"
    return ordered, f"{first.target} gives tokens fastest: {first.reason}"
