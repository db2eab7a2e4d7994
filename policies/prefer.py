"""A request's own preferences among the candidates that its rule has ordered."""

from __future__ import annotations

from collections.abc import Mapping

from policies.choose import Option
from policies.model import Target
from policies.overrides import Overrides, Sort

BY_SORT: dict[Sort, str] = {"price": "cheapest", "latency": "lowest-latency", "throughput": "highest-throughput"}
"""The choice that a request's `sort` stands for."""


def prefer(
    ordered: list[Option], reason: str, asked: Overrides, targets: Mapping[str, Target]
) -> tuple[list[Option], str]:
    """Those it names first, those below what it prefers last, and nobody else where it allows no fallback."""
    first = ordered[0]
    if asked.preferred_max_latency_ms is not None or asked.preferred_min_throughput is not None:
        ordered = sorted(ordered, key=lambda option: not _as_preferred(option, asked))
        if ordered[0] is not first:
            reason = f"{ordered[0].target} is the first of those as fast as the request prefers"
    if asked.order:
        places = {name: place for place, name in enumerate(asked.order)}
        most = len(places)

        def place(option: Option) -> int:
            names = (option.target, targets[option.target].provider)
            return min(places.get(name, most) for name in names)

        ordered = sorted(ordered, key=place)
        if place(ordered[0]) < most:
            reason = f"{ordered[0].target} is what the request asks for first"
        else:
            reason += "; what the request asks for first is no candidate that can take it"
    return (ordered if asked.allow_fallbacks else ordered[:1]), reason


def _as_preferred(option: Option, asked: Overrides) -> bool:
    """Whether nothing that is known of it is slower than the request prefers."""
    ttft_ms, tpot_ms = option.likely_ttft_ms, option.likely_tpot_ms
    latency = asked.preferred_max_latency_ms
    if latency is not None and ttft_ms is not None and ttft_ms > latency:
        return False
    throughput = asked.preferred_min_throughput
    return throughput is None or not tpot_ms or 1000 / tpot_ms >= throughput
