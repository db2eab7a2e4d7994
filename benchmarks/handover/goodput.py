"""Goodput: the highest rate at which nine of ten requests meet both goals, for unified, split and adaptive clusters.

Prompt and answer lengths are those of the Azure LLM inference traces (`--traces`, CC-BY-4.0), scaled to what this model
and machine can hold; without them, log-normal ones of the same medians. Arrivals are Poisson, the same ones for every
mode. DistServe (Zhong et al. 2024) defines goodput so.
"""

from __future__ import annotations

import asyncio
import csv
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import BackendError, Goals
from backends.disagg.cluster import NO_GOALS, Cluster
from benchmarks.handover.clusters import Prompts, asking, options, running
from benchmarks.report import progress

MODES: dict[str, dict[str, Any]] = {
    "unified": {"mode": "unified", "decode": 1},
    "unified, not told": {"mode": "unified", "decode": 1},
    "split": {"disaggregate": "always"},
    "adaptive": {"disaggregate": "adaptive"},
}
NOT_TOLD = "unified, not told"
"""Its scheduler does not know the goals, and so computes prompts in full chunks, as other engines do."""
GOALS = {
    "tightest TPOT": Goals(ttft_ms=4000, tpot_ms=25),
    "tight TPOT": Goals(ttft_ms=4000, tpot_ms=35),
    "tight TTFT": Goals(ttft_ms=1500, tpot_ms=150),
    "loose": Goals(ttft_ms=4000, tpot_ms=300),
}
ATTAINED = 0.9
_MEDIAN_PROMPT, _MEDIAN_ANSWER = 300, 40
_MOST_PROMPT, _MOST_ANSWER = 2000, 160


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: int
    answer: int


def lengths(traces: Path | None, seed: int = 0) -> tuple[str, list[Ask]]:
    """(where they come from, a thousand requests' lengths)."""
    chosen = random.Random(seed)
    if traces is None:
        pairs = [(chosen.lognormvariate(0, 1.0), chosen.lognormvariate(0, 0.8)) for _ in range(1000)]
        source = "log-normal"
    else:
        rows = []
        for path in sorted(traces.glob("*.csv")):
            with path.open() as file:
                rows += [
                    (float(row["ContextTokens"]), float(row["GeneratedTokens"]))
                    for row in csv.DictReader(file)
                    if row.get("ContextTokens") and float(row.get("GeneratedTokens") or 0) > 1
                ]
        pairs, source = chosen.sample(rows, 1000), f"Azure 2023 ({len(rows):,} requests)"
    prompt = sorted(pair[0] for pair in pairs)[500] / _MEDIAN_PROMPT
    answer = sorted(pair[1] for pair in pairs)[500] / _MEDIAN_ANSWER
    return source, [
        Ask(
            max(8, min(_MOST_PROMPT, round(context / prompt))),
            max(4, min(_MOST_ANSWER, round(generated / answer))),
        )
        for context, generated in pairs
    ]


async def attainment(
    cluster: Cluster, asks: list[Ask], prompts: Prompts, goals: Goals, rate: float, seconds: float, *, told: bool = True
) -> float:
    """The share of requests that met both goals, of those that arrived within `seconds` at `rate`; `told`: whether the
    cluster knows them."""
    arrivals = random.Random(round(rate * 1000))
    at, schedule = 0.0, []
    while (at := at + arrivals.expovariate(rate)) < seconds or not schedule:
        schedule.append((at, asks[len(schedule) % len(asks)]))
    begun = time.perf_counter()

    async def one(at: float, ask: Ask) -> bool:
        prompt = prompts.next(ask.prompt)
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        asked = time.perf_counter()
        first = last = asked
        try:
            with asking(cluster, prompt, ask.answer, goals if told else NO_GOALS) as generation:
                async for token in generation:
                    last = time.perf_counter()
                    if token.index == 0:
                        first = last
                        if goals.ttft_ms is not None and (first - asked) * 1000 > goals.ttft_ms:
                            return False  # missed: what follows would only be in the others' way
        except BackendError:
            return False
        tpot_ms = (last - first) * 1000 / max(1, ask.answer - 1)
        return goals.tpot_ms is None or tpot_ms <= goals.tpot_ms

    met = await asyncio.gather(*(one(at, ask) for at, ask in schedule))
    return sum(met) / len(met)


async def highest_rate(
    cluster: Cluster, asks: list[Ask], prompts: Prompts, goals: Goals, seconds: float, steps: int, *, told: bool
) -> tuple[float, list[tuple[float, float]]]:
    """(requests per second at which nine of ten meet the goals, what was measured)."""
    low, high, seen = 0.05, 8.0, []
    rate = 1.0
    for _ in range(steps):
        share = await attainment(cluster, asks, prompts, goals, rate, seconds, told=told)
        seen.append((round(rate, 3), round(share, 3)))
        low, high = (rate, high) if share >= ATTAINED else (low, rate)
        rate = math.sqrt(low * high)
    return low, sorted(seen)


async def measure(
    model: str, mode: str, asks: list[Ask], names: list[str], seconds: float, steps: int
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    chosen = options(model, prefix_cache=False, kv_tokens=16384, **MODES[mode])
    async with running(chosen) as cluster:
        prompts = Prompts(model)
        await attainment(cluster, asks[:4], prompts, Goals(), 2.0, 2.0)
        for name in progress(names, f"goodput, {mode}"):
            told = mode != NOT_TOLD
            rate, seen = await highest_rate(cluster, asks, prompts, GOALS[name], seconds, steps, told=told)
            found[name] = {"requests_per_s": round(rate, 3), "measured": seen, "placed": dict(cluster.pools.placed)}
    return found


def run(model: str, quick: bool, traces: Path | None) -> dict[str, Any]:
    source, asks = lengths(traces)
    names = list(GOALS)[:1] if quick else list(GOALS)
    seconds, steps = (8.0, 3) if quick else (24.0, 6)
    result: dict[str, Any] = {"lengths": source, "median_prompt": _MEDIAN_PROMPT, "median_answer": _MEDIAN_ANSWER}
    for mode in MODES:
        result[mode] = asyncio.run(measure(model, mode, asks, names, seconds, steps))
    result["adaptive_over_better"] = {}
    for name in names:
        rates = {mode: result[mode][name]["requests_per_s"] for mode in MODES}
        better = max(rates["unified"], rates["split"])
        result["adaptive_over_better"][name] = round(rates["adaptive"] / better, 3)
    adaptive = result["adaptive"][names[0]]["requests_per_s"]
    for mode in ("unified", NOT_TOLD):
        ratio = round(adaptive / result[mode][names[0]]["requests_per_s"], 3)
        result[f"adaptive_over_{mode.replace(', ', '_').replace(' ', '_')}_at_tightest_tpot"] = ratio
    return result


def plot(result: dict[str, Any]) -> None:
    """A bar for each mode and pair of goals, on the terminal."""
    from rich.console import Console

    names = [name for name in GOALS if name in result["adaptive"]]
    most = max(result[mode][name]["requests_per_s"] for mode in MODES for name in names)
    console = Console()
    for name in names:
        goals = GOALS[name]
        console.print(f"{name}: TTFT ≤ {goals.ttft_ms} ms, TPOT ≤ {goals.tpot_ms} ms", highlight=False)
        for mode in MODES:
            rate = result[mode][name]["requests_per_s"]
            console.print(f"  {mode:>17} {'█' * max(1, round(40 * rate / most))} {rate:.2f}/s", highlight=False)
