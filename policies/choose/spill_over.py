"""`spill-over`: the first candidate while it keeps the goals, the next ones while it does not.

When: an own cluster, and a hosted API for what it cannot take in time. The order is the policy's; a candidate is left
once the chance that it keeps the goals falls under the rule's `at`, and taken back only at `spill.back_at`: between the
two nothing changes, so that a cluster at its limit is not left and taken back with every request (hysteresis). With
`spill.usd_per_hour`, candidates that cost something get nothing more while the last hour's answers cost that much.
Limits: it knows nothing of cost beyond that order; a candidate of which nothing is known is taken to keep its goals.

A candidate that was left is tried with the rule's `explore` percent of requests (2), so that it is noticed when it is
fast again.
"""

from __future__ import annotations

from policies.choose.cheapest_meeting_slo import declared_to_meet
from policies.choose.option import Asked, Option, due_again


def spill_over(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """Those kept in the policy's order, and then those left, in the same order."""
    kept: list[Option] = []
    left: list[Option] = []
    for option in options:
        was_left = option.target in asked.left
        chance = _chance(option, asked)
        back_at = asked.back_at
        leaves = chance < (back_at if was_left else asked.slo.at)
        (left if leaves else kept).append(option)
        option.verdict = "left" if leaves else "kept"
        said = f"keeps the goals with p={chance:.2f}"
        wanted = f"taken back at {back_at:.2f}" if was_left else f"left below {asked.slo.at:.2f}"
        option.reason = f"{said} ({wanted}), {option.cost_text}"
    ordered = kept + left
    first = ordered[0]
    if kept and (again := due_again(left, first, asked)):
        again[0].reason = f"tried again: nothing was seen of it for {again[0].passed_over} requests"
        ordered = [again[0], *(option for option in ordered if option is not again[0])]
        return ordered, f"{again[0].target} is {again[0].reason}"
    if not kept:
        return ordered, f"no candidate keeps the goals; {first.target} is the policy's first: {first.reason}"
    if first.place:
        spilled = ", ".join(option.target for option in left if option.place < first.place)
        return ordered, f"spilled over from {spilled} to {first.target}, which {first.reason}"
    return ordered, f"{first.target} is the policy's first and {first.reason}"


def _chance(option: Option, asked: Asked) -> float:
    if option.p_meet is not None:
        return option.p_meet
    if not asked.slo.goals:
        return 1.0
    return 0.0 if declared_to_meet(option.expect, asked.slo.goals) is False else 1.0
