"""`cheapest-meeting-slo`: of the targets that keep the goals often enough, the cheapest.

A target keeps the goals when the chance that this request meets all of them, from what the target did lately
(policies/predict.py), is at least the rule's `at`. With too little history, what the policy declares with
`expect:` counts; without that the target is unknown, which is said and is neither a yes nor a no
(litellm#39970). Order: those that keep the goals by cost, the unknown in the policy's order, and those that
are expected to miss, the likeliest first: a request that nobody serves in time is still served.
"""

from __future__ import annotations

import math

from policies.choose.option import Option
from policies.model import Goals, Slo


def cheapest_meeting_slo(options: list[Option], slo: Slo) -> tuple[list[Option], str]:
    """Without any goal every target meets it, and the cheapest comes first."""
    meeting: list[Option] = []
    unknown: list[Option] = []
    missing: list[Option] = []
    for option in options:
        verdict, option.reason = _judge(option, slo)
        (unknown if verdict is None else meeting if verdict else missing).append(option)
    meeting.sort(key=lambda option: (_cost(option), -(option.p_meet or 0.0), option.place))
    missing.sort(key=lambda option: (-(option.p_meet or 0.0), option.place))
    ordered = meeting + unknown + missing
    first = ordered[0]
    if meeting:
        others = "" if len(meeting) == 1 else f" of {len(meeting)} that do"
        return ordered, f"{first.target} meets the goals at least cost{others}: {first.reason}"
    if unknown:
        return ordered, f"{first.target} is first of those whose latency is unknown, as none is known to meet the goals"
    return ordered, f"no target is expected to meet the goals; {first.target} is the likeliest: {first.reason}"


def _cost(option: Option) -> float:
    return math.inf if option.cost_usd is None else option.cost_usd


def _judge(option: Option, slo: Slo) -> tuple[bool | None, str]:
    """(whether the target keeps the goals, or None where unknown; the reason)."""
    if not slo.goals:
        return True, f"no goal to meet, {option.cost_text}"
    if option.p_meet is not None:
        meets = option.p_meet >= slo.at
        word = "meets" if meets else "misses"
        return meets, f"{word} the goals with p={option.p_meet:.2f} (asked: {slo.at:.2f}), {option.cost_text}"
    declared = _declared(option.expect, slo.goals)
    if declared is None:
        return None, f"latency unknown: too few answers observed and no `expect` declared, {option.cost_text}"
    return declared, f"declared to {'meet' if declared else 'miss'} the goals (`expect`), {option.cost_text}"


def _declared(expect: Goals, goals: Goals) -> bool | None:
    """Whether the declared latency keeps every goal; None where nothing is declared for one of them."""
    verdicts = []
    for goal, declared in ((goals.ttft_ms, expect.ttft_ms), (goals.tpot_ms, expect.tpot_ms)):
        if goal is not None:
            verdicts.append(None if declared is None else declared <= goal)
    if False in verdicts:
        return False
    return None if None in verdicts else True
