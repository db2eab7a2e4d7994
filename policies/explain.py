"""A decision as it is shown: what was chosen, from what, and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from policies.model import Goals

_HEADER_CHARS = 256


class Candidate(NamedTuple):
    """One target of the matching rule. Predictions are None where nothing is known yet."""

    target: str
    kept: bool
    reason: str
    """Why it was kept at its place, or dropped."""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    p_meet: float | None = None
    """The chance that the goals are met, 0 to 1."""
    cost_usd: float | None = None
    """Of this request, at the expected answer length; None where the target has no price."""


class Predicted(NamedTuple):
    """What was expected of a target when a request was decided; None where nothing was known."""

    ttft_ms: float | None
    tpot_ms: float | None
    p_meet: float | None


class Decision:
    """Where a request goes. The same inputs give the same decision, live, in `explain` and in checks."""

    __slots__ = (
        "_candidates",
        "choose",
        "class_name",
        "goals",
        "left",
        "mirror",
        "order",
        "predicted",
        "reason",
        "route",
        "rule",
    )

    def __init__(
        self,
        route: str,
        class_name: str,
        rule: int,
        choose: str,
        candidates: Callable[[], tuple[Candidate, ...]],
        order: tuple[str, ...],
        reason: str,
        mirror: str | None = None,
        left: frozenset[str] = frozenset(),
        goals: Goals | None = None,
        predicted: Callable[[str], Predicted] = lambda target: Predicted(None, None, None),
    ) -> None:
        """`candidates` is called when somebody asks: most decisions are carried out and never looked at."""
        self.route = route
        self.class_name = class_name
        self.rule = rule
        """The line of the rule in the policy file."""
        self.choose = choose
        self.order = order
        """The targets to try, best first."""
        self.reason = reason
        """Why the first one is first."""
        self.mirror = mirror
        """A target that gets a copy of the request."""
        self.left = left
        """With `choose: spill-over`, the targets that do not keep the goals."""
        self.predicted = predicted
        """By target, one of `order`."""
        self.goals = goals
        """The request's and the rule's, the stricter of each; None where nothing is asked."""
        self._candidates: tuple[Candidate, ...] | Callable[[], tuple[Candidate, ...]] = candidates

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """In the policy's order, dropped ones included."""
        if callable(self._candidates):
            self._candidates = self._candidates()
        return self._candidates

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Decision({self.to_dict()})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "route": self.route,
            "class": self.class_name,
            "rule": self.rule,
            "choose": self.choose,
            "goals": {"ttft_ms": self.goals.ttft_ms, "tpot_ms": self.goals.tpot_ms} if self.goals else None,
            "candidates": [candidate._asdict() for candidate in self.candidates],
            "order": self.order,
            "mirror": self.mirror,
            "reason": self.reason,
        }

    def header(self) -> str:
        """For a response header: at most 256 printable ASCII characters."""
        order = ",".join(self.order)
        text = f"class={self.class_name}; rule={self.rule}; choose={self.choose}; order={order}; {self.reason}"
        if not (text.isascii() and text.isprintable()):
            text = re.sub(r"[^\x20-\x7e]", "?", text)
        return text if len(text) <= _HEADER_CHARS else text[: _HEADER_CHARS - 3] + "..."
