"""`when:` as data: which facts of a request are compared with what. All comparisons of a condition must hold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]
"""A value for each signal; None where the request does not say (no goal, no max_tokens)."""

NUMBERS = ("prompt_tokens", "max_tokens", "ttft_ms", "tpot_ms")
TEXTS = ("class", "model")
FLAGS = ("stream",)
SIGNALS = (*NUMBERS, *TEXTS, *FLAGS)

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
    "in": lambda value, listed: value in listed,
}


@dataclass(frozen=True, slots=True)
class Test:
    """One comparison. A signal that the request does not have matches nothing, `lte` included."""

    signal: str
    op: str
    value: Any
    """What the signal is compared with: a number, text or flag; for `in` a tuple of them."""

    def holds(self, facts: Facts) -> bool:
        fact = facts[self.signal]
        return fact is not None and OPERATORS[self.op](fact, self.value)


@dataclass(frozen=True, slots=True)
class Condition:
    """Holds when every test does; without tests, always."""

    tests: tuple[Test, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tests)

    def holds(self, facts: Facts) -> bool:
        return all(test.holds(facts) for test in self.tests)


def never_holds(tests: tuple[Test, ...]) -> bool:
    """Whether comparisons of one signal exclude each other, as in `{gte: 10, lt: 5}`."""
    values = [test.value for test in tests if test.op == "eq"]
    values += [value for test in tests if test.op == "in" for value in test.value]
    if values:
        return not any(all(OPERATORS[test.op](value, test.value) for test in tests) for value in values)
    low = max(((test.value, test.op == "gt") for test in tests if test.op in ("gt", "gte")), default=None)
    high = min(((test.value, test.op == "lte") for test in tests if test.op in ("lt", "lte")), default=None)
    if low is None or high is None:
        return False
    return bool(low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1])))
