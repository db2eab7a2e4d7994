"""`cheapest`: whoever costs least for this request.

When: nobody waits for the answer. Limits: latency plays no part; a target without a price comes last, not free.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option, ranked


def cheapest(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By the cost of prompt and expected answer."""
    ordered = ranked(options, lambda option: option.cost_usd)
    for option in options:
        option.reason = option.cost_text
    first = ordered[0]
    if first.cost_usd is None:
        return ordered, f"{first.target} is first in the policy's order, as nobody has a price"
    return ordered, f"{first.target} is the cheapest: {first.reason}"
