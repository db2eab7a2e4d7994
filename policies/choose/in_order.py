"""`in-order`: the candidates as the policy lists them; later ones serve where earlier ones fail.

When: one target is preferred and the rest are there in case. Limits: neither load, cost nor latency plays a part.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option


def in_order(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """The policy's own order. Goals play no part."""
    for place, option in enumerate(options):
        option.reason = "first in the policy's order" if place == 0 else f"number {place + 1} in the policy's order"
    return options, f"{options[0].target} is first in the policy's order"
