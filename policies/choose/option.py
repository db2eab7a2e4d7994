"""What a chooser knows of one candidate."""

from __future__ import annotations

from dataclasses import dataclass

from policies.model import Goals


@dataclass(slots=True)
class Option:
    """`p_meet` and the predictions are None where too little has been observed."""

    target: str
    place: int
    """In the policy's order, from 0."""
    cost_usd: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    p_meet: float | None
    expect: Goals
    """What the policy declares the target to keep."""
    reason: str = ""

    @property
    def cost_text(self) -> str:
        return "cost unknown" if self.cost_usd is None else f"${self.cost_usd:.6f}"
