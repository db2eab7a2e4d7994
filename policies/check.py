"""Runs a policy's own `checks:` through the same decision that requests get."""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.decide import decide
from policies.errors import NoCandidate, NoRoute
from policies.model import Check, Policy
from policies.state import RouterState


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """A check whose request was decided otherwise."""

    file: str
    line: int
    expected: str
    got: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: expected {self.expected}, got {self.got}: {self.reason}"


def check(policy: Policy) -> tuple[CheckFailure, ...]:
    """The checks that fail, in the file's order. Decided as by a router that has observed nothing."""
    return tuple(failure for one in policy.checks if (failure := _run(policy, one)) is not None)


def _run(policy: Policy, one: Check) -> CheckFailure | None:
    expected = {"target": one.target, "class": one.class_name, "route": one.route}
    expected = {name: value for name, value in expected.items() if value is not None}
    try:
        decision = decide(policy, one.request, RouterState(), random.Random(0))
    except (NoRoute, NoCandidate) as error:
        return CheckFailure(policy.filename, one.line, _words(expected), "no target", str(error))
    got = {"target": decision.order[0], "class": decision.class_name, "route": decision.route}
    if all(got[name] == value for name, value in expected.items()):
        return None
    return CheckFailure(
        policy.filename, one.line, _words(expected), _words({name: got[name] for name in expected}), decision.reason
    )


def _words(facts: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in facts.items())
