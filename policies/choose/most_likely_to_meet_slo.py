"""`most-likely-to-meet-slo`: whoever keeps the goals with the greatest chance, whatever it costs.

When: missing the goal is worse than any price. Limits: it pays for the last per cent, where cheapest-meeting-slo
stops at enough.
"""

from __future__ import annotations

from policies.choose.cheapest_meeting_slo import declared_to_meet
from policies.choose.option import Asked, Option

_SAME = 0.02
"""Chances that differ by less are the same: the cheaper one is taken."""


def most_likely_to_meet_slo(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By chance, then cost. What is only declared stands between those likely to meet the goals and those not."""
    chances = {option.target: _chance(option, asked) for option in options}

    def key(option: Option) -> tuple[float, float, int]:
        chance = chances[option.target]
        cost = float("inf") if option.cost_usd is None else option.cost_usd
        return (-round((0.5 if chance is None else chance) / _SAME), cost, option.place)

    ordered = sorted(options, key=key)
    for option in options:
        chance = chances[option.target]
        said = "its chance is unknown" if chance is None else f"meets the goals with p={chance:.2f}"
        option.reason = f"{said}, {option.cost_text}"
    first = ordered[0]
    return ordered, f"{first.target} is the likeliest: {first.reason}"


def _chance(option: Option, asked: Asked) -> float | None:
    if option.p_meet is not None or not asked.slo.goals:
        return option.p_meet if asked.slo.goals else 1.0
    declared = declared_to_meet(option.expect, asked.slo.goals)
    return None if declared is None else asked.slo.at if declared else 0.0
