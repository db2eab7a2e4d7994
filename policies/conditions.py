"""`when:` as data: which facts of a request are compared with what. All parts of a condition must hold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]
"""A value for each signal; None where the request does not say (no goal, no max_tokens)."""

NUMBERS = ("prompt_tokens", "uncached_tokens", "max_tokens", "ttft_ms", "tpot_ms", "priority", "hour")
TEXTS = ("class", "model", "session", "key", "weekday")
FLAGS = ("stream",)
SETS = ("needs",)
KEYED = ("metadata", "headers")
"""Signals with names of their own under them: `metadata: {team: search}`."""
SIGNALS = (*NUMBERS, *TEXTS, *FLAGS, *SETS, *KEYED)
GROUPS = ("any", "all", "not")
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

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
    key: str | None = None
    """For signals with names under them."""

    def holds(self, facts: Facts) -> bool:
        fact = facts[self.signal]
        if self.key is not None:
            fact = fact.get(self.key)
        elif self.signal in SETS:
            return any(value in fact for value in (self.value if self.op == "in" else (self.value,)))
        return fact is not None and OPERATORS[self.op](fact, self.value)


@dataclass(frozen=True, slots=True)
class Condition:
    """Holds when every test does, every group of `any_of` has one that holds, every one of `all_of` does, and none of
    `none_of`; without any of these, always."""

    tests: tuple[Test, ...] = ()
    any_of: tuple[tuple[Condition, ...], ...] = ()
    all_of: tuple[Condition, ...] = ()
    none_of: tuple[Condition, ...] = ()
    _plain: tuple[tuple[str, Callable[[Any, Any], bool], Any], ...] = field(init=False, repr=False, compare=False)
    """Those of `tests` that compare one fact: most of them, and first in line, because this runs for every rule."""
    _keyed: tuple[Test, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = [test for test in self.tests if test.key is None and test.signal not in SETS]
        object.__setattr__(self, "_plain", tuple((test.signal, OPERATORS[test.op], test.value) for test in plain))
        object.__setattr__(self, "_keyed", tuple(test for test in self.tests if test not in plain))

    def __bool__(self) -> bool:
        return bool(self.tests or self.any_of or self.all_of or self.none_of)

    def holds(self, facts: Facts) -> bool:
        for signal, holds, value in self._plain:
            if (fact := facts[signal]) is None or not holds(fact, value):
                return False
        for test in self._keyed:
            if not test.holds(facts):
                return False
        for group in self.any_of:
            if not any(one.holds(facts) for one in group):
                return False
        for one in self.all_of:
            if not one.holds(facts):
                return False
        return not any(one.holds(facts) for one in self.none_of) if self.none_of else True

    def keys(self, signal: str) -> frozenset[str]:
        """The names under `signal` that it asks for."""
        found = {test.key for test in self.tests if test.signal == signal and test.key is not None}
        parts = (*(one for group in self.any_of for one in group), *self.all_of, *self.none_of)
        return frozenset(found.union(*(one.keys(signal) for one in parts)))


def never_holds(tests: tuple[Test, ...]) -> bool:
    """Whether comparisons of one signal exclude each other, as in `{gte: 10, lt: 5}`."""
    if any(test.signal in SETS for test in tests):
        return False
    values = [test.value for test in tests if test.op == "eq"]
    values += [value for test in tests if test.op == "in" for value in test.value]
    if values:
        return not any(all(OPERATORS[test.op](value, test.value) for test in tests) for value in values)
    low = max(((test.value, test.op == "gt") for test in tests if test.op in ("gt", "gte")), default=None)
    high = min(((test.value, test.op == "lte") for test in tests if test.op in ("lt", "lte")), default=None)
    if low is None or high is None:
        return False
    return bool(low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1])))
