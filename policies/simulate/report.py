"""What a simulation says: per class, and in all, who was served how fast, by whom, and for how much."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from policies.simulate.run import Outcome
from policies.simulate.world import World

_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one class, or of all requests. Times in milliseconds; empty where there are none."""

    requests: int
    refused: int
    attainment: float
    """The share that kept its goals."""
    goodput_per_s: float
    """How many of those there were in a second."""
    cost_usd: float
    unpriced: int
    """Requests whose cost is unknown."""
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    targets: dict[str, float]
    """Each target's share."""


@dataclass(frozen=True, slots=True)
class Report:
    seconds: float
    """From the first arrival to the last."""
    classes: dict[str, Figures]
    total: Figures
    origins: dict[str, str]
    """Where each target's behaviour is from: declared, expected or assumed."""
    brier: float | None
    """Mean squared error of the predicted chances to meet the goals; None where none was predicted."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def summarize(outcomes: Sequence[Outcome], world: World) -> Report:
    """`outcomes` must not be empty."""
    seconds = outcomes[-1].request.at_s - outcomes[0].request.at_s
    by_class: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_class[outcome.class_name].append(outcome)
    judged = [(one.predicted, one.met) for one in outcomes if one.predicted is not None and one.goals]
    return Report(
        seconds=seconds,
        classes={name: _figures(of, seconds) for name, of in sorted(by_class.items())},
        total=_figures(outcomes, seconds),
        origins={name: behaviour.origin for name, behaviour in world.targets.items()},
        brier=sum((chance - met) ** 2 for chance, met in judged) / len(judged) if judged else None,
    )


def _figures(outcomes: Sequence[Outcome], seconds: float) -> Figures:
    met = sum(one.met for one in outcomes)
    shares = Counter(one.target for one in outcomes if one.target is not None)
    served = [one for one in outcomes if one.target is not None]
    return Figures(
        requests=len(outcomes),
        refused=len(outcomes) - len(served),
        attainment=met / len(outcomes),
        goodput_per_s=met / seconds if seconds else float(met),
        cost_usd=sum(one.cost_usd or 0.0 for one in served),
        unpriced=sum(one.cost_usd is None for one in served),
        ttft_ms=_quantiles([one.ttft_s * 1000 for one in served if one.ttft_s is not None]),
        tpot_ms=_quantiles([one.tpot_s * 1000 for one in served if one.tpot_s is not None]),
        targets={name: count / len(outcomes) for name, count in sorted(shares.items())},
    )


def _quantiles(values: list[float]) -> dict[str, float]:
    values.sort()
    return {f"p{q * 100:g}": values[min(len(values) - 1, int(q * len(values)))] for q in _QUANTILES} if values else {}
