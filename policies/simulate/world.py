"""How targets behave in a simulation: hosted ones by a line and a spread, own clusters by workers and their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from policies.model import OWN_HARDWARE, Policy, Speed, Target

Origin = Literal["declared", "expected", "assumed"]

ASSUMED_HOSTED = Speed(ttft_ms=500.0, ttft_ms_per_1k=40.0, tpot_ms=15.0, spread=0.35)
"""Of a hosted target of which the policy says nothing: about what large providers give mid-size models."""
ASSUMED_OWN = Speed(
    spread=0.02,
    step_ms=12.0,
    step_ms_per_stream=1.1,
    step_ms_per_1k_context=2.6,
    prompt_ms_per_1k=1040.0,
    prompt_ms_per_1k_pairs=0.6,
    transfer_ms_per_1k=3.0,
)
"""Of the bundled cluster with SmolLM2-135M, one Zen 4 core a worker."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """`cluster` names the workers that a target shares with others; None for a hosted one."""

    speed: Speed
    origin: Origin
    """Where `speed` is from: `declared` by the target's `speed`, `expected` from its `expect`, or `assumed`."""
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class Workers:
    """Of one cluster."""

    prefill: int
    """0 where decode workers compute prompts too."""
    decode: int
    chunk: int = 512
    """Prompt tokens in a step, at most."""
    max_batch: int = 64
    adaptive: bool = False
    """Each request is split only where that is worth it."""


@dataclass(frozen=True, slots=True)
class World:
    targets: Mapping[str, Behaviour]
    clusters: Mapping[str, Workers] = field(default_factory=dict)
    changes: tuple[tuple[float, str, Speed], ...] = ()
    """(seconds, hosted target, how it behaves from then on): what nobody tells the policy."""


def world_of(policy: Policy) -> World:
    """As the policy declares it; what it does not is assumed, and said to be."""
    clusters: dict[str, Workers] = {}
    for name, provider in policy.providers.items():
        if provider.type in OWN_HARDWARE:
            clusters[name] = _workers(provider.options)
    return World(
        {
            target.name: _behaviour(target, target.provider if target.provider in clusters else None)
            for target in policy.targets.values()
        },
        clusters,
    )


def _workers(options: object) -> Workers:
    def count(name: str, default: int) -> int:
        value = getattr(options, name, default)
        return value if isinstance(value, int) else default

    elsewhere = [worker.role for worker in getattr(options, "workers", ())]
    split = getattr(options, "mode", "split") == "split"
    prefill = count("prefill", 1) + elsewhere.count("prefill") if split else 0
    return Workers(
        prefill,
        max(1, count("decode", 1) + len(elsewhere) - elsewhere.count("prefill")),
        count("prefill_chunk", 512),
        count("max_batch", 64),
        adaptive=prefill > 0 and getattr(options, "disaggregate", "always") == "adaptive",
    )


def _behaviour(target: Target, cluster: str | None) -> Behaviour:
    if target.speed is not None:
        return Behaviour(target.speed, "declared", cluster)
    assumed = ASSUMED_OWN if cluster else ASSUMED_HOSTED
    if cluster is None and target.expect:
        ttft_ms, tpot_ms = target.expect.ttft_ms, target.expect.tpot_ms
        speed = Speed(
            ttft_ms=assumed.ttft_ms if ttft_ms is None else ttft_ms,
            tpot_ms=assumed.tpot_ms if tpot_ms is None else tpot_ms,
            spread=assumed.spread,
        )
        return Behaviour(speed, "expected")
    return Behaviour(assumed, "assumed", cluster)
