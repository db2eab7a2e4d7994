"""`in-order`: the candidates as the policy lists them; later ones serve where earlier ones fail."""

from __future__ import annotations

from policies.choose.option import Option
from policies.model import Slo


def in_order(options: list[Option], slo: Slo) -> tuple[list[Option], str]:
    """The policy's own order. Goals play no part."""
    for place, option in enumerate(options):
        option.reason = "first in the policy's order" if place == 0 else f"number {place + 1} in the policy's order"
    return options, f"{options[0].target} is first in the policy's order"
