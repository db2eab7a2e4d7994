"""What a request may change of its rule, in OpenRouter's words (openrouter.ai/docs, provider routing)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from policies.model import Price

Sort = Literal["price", "latency", "throughput"]
OVERRIDES = (
    "order",
    "only",
    "ignore",
    "sort",
    "max_price",
    "preferred_max_latency",
    "preferred_min_throughput",
    "allow_fallbacks",
    "require_parameters",
    "data_collection",
)
"""Their names; a policy's `overrides` says which are allowed."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Targets are named by their own names or by their providers'."""

    order: tuple[str, ...] = ()
    """These first, in this order; the rule's other candidates stand in."""
    only: tuple[str, ...] = ()
    """Nobody else; empty: everybody."""
    ignore: tuple[str, ...] = ()
    sort: Sort | None = None
    """In place of the rule's `choose`."""
    max_price: Price | None = None
    """Targets that cost more, or whose price is unknown, are dropped."""
    preferred_max_latency_ms: float | None = None
    """Those expected to take longer to the first token come last."""
    preferred_min_throughput: float | None = None
    """Tokens per second: those expected to give fewer come last."""
    allow_fallbacks: bool = True
    """Whether others stand in for the first."""
    require_parameters: bool = False
    """Whether a target must be declared to have what the request needs; else it may be unknown."""
    deny_data_collection: bool = False
    """Only targets whose provider keeps nothing."""


UNCHANGED = Overrides()
"""What a request has that asks for nothing."""
