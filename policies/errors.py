"""What can be wrong: with a policy (every problem at once, each with its place) and with a request.

A message names the field, the value and the remedy. It never carries the value of an environment variable or
of a provider's secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.eligible import Dropped
    from policies.explain import Decision

_SHOWN = 8


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong in a policy file. Lines and columns count from 1."""

    file: str
    line: int
    column: int
    message: str
    suggestion: str | None = None

    def __str__(self) -> str:
        remedy = f" ({self.suggestion})" if self.suggestion else ""
        return f"{self.file}:{self.line}:{self.column}: {self.message}{remedy}"


class PolicyError(Exception):
    """A policy that cannot be used. `problems` has all that is wrong, in the file's order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class NoRoute(Exception):
    """The model that was asked for is no route of the policy."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        self.model = model
        self.known = tuple(known)
        super().__init__(f"no route for model {model!r} ({did_you_mean(model, self.known)})")


class NoCandidate(Exception):
    """No candidate of the matching rule can take the request; `decision` has each one's reason, `kinds` what they
    failed by (`policies.eligible.Kind`), `why` each one's."""

    def __init__(self, decision: Decision, why: Mapping[str, Dropped] | None = None) -> None:
        self.decision = decision
        self.why = dict(why or {})
        self.kinds = frozenset(dropped.kind for dropped in self.why.values())
        dropped = "; ".join(f"{candidate.target}: {candidate.reason}" for candidate in decision.candidates)
        super().__init__(f"no candidate of route {decision.route!r} can take this request: {dropped}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name: the closest known one, else what there is."""
    names = list(known)
    if close := get_close_matches(name, names, n=1):
        return f"did you mean {close[0]!r}?"
    if not names:
        return "none is defined"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"known: {', '.join(names[:_SHOWN])}{more}"
