"""`weighted`: drawn at random, each as often as its weight says.

When: traffic is split between equals by share, or a newcomer gets a few per cent of it (a canary). Limits: a draw knows
neither load nor latency; over few requests the shares are only about right.
"""

from __future__ import annotations

import math

from policies.choose.option import Asked, Option


def weighted(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """`weights` of the rule, 1 where it names none. The whole order is drawn, so what stands in is too.

    Sampling without replacement by exponential clocks (Efraimidis & Spirakis 2006).
    """
    total = sum(_weight(option, asked) for option in options)
    drawn: list[tuple[float, Option]] = []
    for option in options:
        weight = _weight(option, asked)
        share = weight / total if total else 0.0
        option.reason = f"weight {weight:g}, {share:.0%} of the requests"
        drawn.append((asked.rng.expovariate(weight) if weight else math.inf, option))
    drawn.sort(key=lambda one: (one[0], one[1].place))
    first = drawn[0][1]
    return [option for _, option in drawn], f"{first.target} was drawn: {first.reason}"


def _weight(option: Option, asked: Asked) -> float:
    return asked.weights.get(option.target, 1.0)
