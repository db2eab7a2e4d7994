"""`cheapest-meeting-slo`: of the targets that keep the goals often enough, the cheapest.

A target keeps the goals when the chance that this request meets all of them, from what the target did lately
(policies/predict.py), is at least the rule's `at`. With too little history, what the policy declares with `expect:`
counts; without that the target is unknown, which is said and is neither a yes nor a no (litellm#39970). Order: those
that keep the goals by cost, the unknown in the policy's order, and those that are expected to miss, the likeliest
first: a request that nobody serves in time is still served.

A cheaper target that is thought too slow, or of which nothing is known, is tried again with the rule's
`explore` percent of requests (2), so that it is noticed when it has become fast. That is what exploring may cost: at
most so many answers may be late.
"""

from __future__ import annotations

import math

from policies.choose.option import Asked, Option, due_again
from policies.model import Goals, Slo


def cheapest_meeting_slo(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """Without any goal every target meets it, and the cheapest comes first."""
    meeting: list[Option] = []
    unknown: list[Option] = []
    missing: list[Option] = []
    at = asked.slo.at

    def say(option: Option) -> str:
        return _SAID[option.verdict].format(p=option.p_meet, at=at) + f", {option.cost_text}"

    for option in options:
        option.verdict = verdict = _judge(option, asked.slo)
        option.say = say
        (unknown if verdict == "unknown" else meeting if verdict in _MEETING else missing).append(option)
    meeting.sort(key=_by_cost)
    missing.sort(key=lambda option: (-(option.p_meet or 0.0), option.place))
    ordered = meeting + unknown + missing
    first = ordered[0]
    if (again := _forgotten(first, unknown + missing, asked)) is not None:
        again.reason = f"tried again: nothing was seen of it for {again.passed_over} requests, {again.cost_text}"
        ordered = [again, *(option for option in ordered if option is not again)]
        return ordered, f"{again.target} costs less than {first.target} and is {again.reason}"
    if meeting:
        others = "" if len(meeting) == 1 else f" of {len(meeting)} that do"
        return ordered, f"{first.target} meets the goals at least cost{others}: {first.why}"
    if unknown:
        return ordered, f"{first.target} is first of those whose latency is unknown, as none is known to meet the goals"
    return ordered, f"no target is expected to meet the goals; {first.target} is the likeliest: {first.why}"


_SAID = {
    "no goal": "no goal to meet",
    "meets": "meets the goals with p={p:.2f} (asked: {at:.2f})",
    "misses": "misses the goals with p={p:.2f} (asked: {at:.2f})",
    "unknown": "latency unknown: too few answers observed and no `expect` declared",
    "declared to meet": "declared to meet the goals (`expect`)",
    "declared to miss": "declared to miss the goals (`expect`)",
}
_MEETING = frozenset({"no goal", "meets", "declared to meet"})


def _judge(option: Option, slo: Slo) -> str:
    """A key of `_SAID`."""
    if option.p_meet is not None:
        return "meets" if option.p_meet >= slo.at else "misses"
    if not slo.goals:
        return "no goal"
    declared = declared_to_meet(option.expect, slo.goals)
    return "unknown" if declared is None else "declared to meet" if declared else "declared to miss"


def _by_cost(option: Option) -> tuple[float, float, int]:
    return (_cost(option), -(option.p_meet or 0.0), option.place)


def _forgotten(first: Option, others: list[Option], asked: Asked) -> Option | None:
    """A cheaper target that has idled since it was thought too slow: it may be fast by now, and only trying tells."""
    due = [option for option in due_again(others, first, asked) if _cost(option) < _cost(first)]
    return min(due, key=_by_cost, default=None)


def _cost(option: Option) -> float:
    return math.inf if option.cost_usd is None else option.cost_usd


def declared_to_meet(expect: Goals, goals: Goals) -> bool | None:
    """Whether the declared latency keeps every goal; None where nothing is declared for one of them."""
    verdicts = []
    for goal, declared in ((goals.ttft_ms, expect.ttft_ms), (goals.tpot_ms, expect.tpot_ms)):
        if goal is not None:
            verdicts.append(None if declared is None else declared <= goal)
    if False in verdicts:
        return False
    return None if None in verdicts else True
