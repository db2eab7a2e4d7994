"""`lowest-latency`: whoever is predicted to answer first.

When: latency is all that counts. Limits: everybody prefers the same target until it slows down; cost plays no part.
"Latency" is the time to the first token where that was asked for, else until the answer's end at its expected length,
so that a long answer is not taken for a slow target (litellm#40202).
"""

from __future__ import annotations

from policies.choose.option import Asked, Option, due_again, ranked


def lowest_latency(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By predicted, else declared time; those of which nothing is known come last, and are said to be unknown."""
    times = {option.target: _time(option, asked) for option in options}
    ordered = ranked(options, lambda option: times[option.target])
    for option in options:
        known = times[option.target]
        option.reason = "latency unknown" if known is None else f"{known:.0f} ms {_what(option, asked)} expected"
    first = ordered[0]
    if due := due_again(options, first, asked):
        again = max(due, key=lambda option: option.passed_over)
        again.reason += f"; nothing was seen of it for {again.passed_over} requests"
        return [again, *(option for option in ordered if option is not again)], f"{again.target} is tried again"
    if times[first.target] is None:
        return ordered, f"{first.target} is first in the policy's order, as nobody's latency is known"
    return ordered, f"{first.target} is the fastest: {first.reason}"


def _whole(option: Option, asked: Asked) -> bool:
    return asked.slo.goals.ttft_ms is None and option.likely_tpot_ms is not None


def _what(option: Option, asked: Asked) -> str:
    return "to the answer's end" if _whole(option, asked) else "to the first token"


def _time(option: Option, asked: Asked) -> float | None:
    ttft_ms, tpot_ms = option.likely_ttft_ms, option.likely_tpot_ms
    if ttft_ms is None or not _whole(option, asked) or tpot_ms is None:
        return ttft_ms
    return ttft_ms + tpot_ms * (asked.answer_tokens - 1)
