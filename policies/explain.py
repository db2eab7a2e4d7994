"""A decision as it is shown: what was chosen, from what, and why."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

_HEADER_CHARS = 256


@dataclass(frozen=True, slots=True)
class Candidate:
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


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes. The same inputs give the same decision, live, in `explain` and in checks."""

    route: str
    class_name: str
    rule: int
    """The line of the rule in the policy file."""
    choose: str
    candidates: tuple[Candidate, ...]
    """In the policy's order, dropped ones included."""
    order: tuple[str, ...]
    """The targets to try, best first."""
    reason: str
    """Why the first one is first."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        facts = asdict(self)
        return {"class" if name == "class_name" else name: value for name, value in facts.items()}

    def header(self) -> str:
        """For a response header: at most 256 printable ASCII characters."""
        order = ",".join(self.order)
        text = f"class={self.class_name}; rule={self.rule}; choose={self.choose}; order={order}; {self.reason}"
        text = re.sub(r"[^\x20-\x7e]", "?", text)
        return text if len(text) <= _HEADER_CHARS else text[: _HEADER_CHARS - 3] + "..."
