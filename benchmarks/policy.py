"""The policy brain: `python -m benchmarks.policy [--quick] [--json FILE]`.

decide     one decision over 50 rules and 20 candidates
simulate   a million requests through a policy, in simulated time
adapt      two hosted targets, one of which changes its speed unannounced: are the predicted chances calibrated, and
           does cheapest-meeting-slo keep its goal for less than others?
reality    the bundled cluster behind `splitroute up`, asked for 10 minutes at the real speed of Azure-shaped traffic,
           and the same simulated from the speeds that its workers had learned in a minute before
tokens     estimates of prompt lengths against the vocabularies that are on disk (`pip install tiktoken litellm` puts
           OpenAI's, Anthropic's and DeepSeek's there), as they are and after a target has reported 30 counts
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import policies
from backends.options import PROVIDER_OPTIONS
from benchmarks.estimates import run_tokens
from benchmarks.reality import run_reality
from benchmarks.report import machine, percentile, progress, show, write_json
from policies import Goals, Policy, Profile, RouterState, decide
from policies.model import Speed
from policies.simulate import Request, World, simulate, summarize, world_of
from policies.simulate.run import Outcome

_GOAL_MS = 900.0
_SHARE = 0.9


def _load(text: str) -> Policy:
    return policies.load(text, filename="benchmark.yaml", env={}, provider_types=PROVIDER_OPTIONS)


# --- decide -----------------------------------------------------------------------------------------------


def _large() -> Policy:
    """50 rules, each but the last with two comparisons, and 20 candidates in the last one."""
    names = [f"t{number}" for number in range(20)]
    targets = "".join(
        f"  {name}: {{provider: api, model: m, context: 128000, price: {{input: {number + 1}, output: 2}}}}\n"
        for number, name in enumerate(names)
    )
    rules = "".join(
        f"    - {{when: {{prompt_tokens: {{gte: {100_000 + number}}}, metadata: {{team: t{number}}}}}, "
        "candidates: [t0], choose: in-order}\n"
        for number in range(49)
    )
    last = f"    - {{candidates: [{', '.join(names)}], choose: cheapest-meeting-slo, slo: {{ttft_ms: 500}}}}\n"
    return _load(f"version: 1\nproviders:\n  api: {{type: openai}}\ntargets:\n{targets}routes:\n  chat:\n{rules}{last}")


def run_decide(quick: bool) -> dict[str, Any]:
    policy, state, rng = _large(), RouterState(), random.Random(0)
    for name in policy.targets:
        for _ in range(80):
            state[name].observe(rng.randint(50, 4000), rng.uniform(0.2, 0.8), 0.02, rng.randint(0, 5))
    took = []
    for _ in range(2000 if quick else 20000):
        profile = Profile("chat", rng.randint(10, 4000), goals=Goals(500.0), metadata={"team": "none"})
        begun = time.perf_counter_ns()
        decide(policy, profile, state, rng)
        took.append((time.perf_counter_ns() - begun) / 1000)
    return {
        "rules": 50,
        "candidates": 20,
        "p50_us": round(percentile(took, 0.5), 1),
        "p99_us": round(percentile(took, 0.99), 1),
    }


# --- simulate ---------------------------------------------------------------------------------------------

_WORLD = """\
version: 1
providers:
  api: {type: openai}
  own: {type: disagg, model: smollm2-135m, prefill: 2, decode: 2}
targets:
  mini: {provider: api, model: m, price: {input: 0.15, output: 0.6},
         speed: {ttft_ms: 400, ttft_ms_per_1k: 30, tpot_ms: 12, spread: 0.4}}
  tiny: {provider: own, context: 8192}
routes:
  chat: [{candidates: [tiny, mini], choose: cheapest-meeting-slo, slo: {ttft_ms: 1500, at: p90}}]
"""


def run_simulate(quick: bool) -> dict[str, Any]:
    count = 50_000 if quick else 1_000_000
    rng, at = random.Random(0), 0.0
    requests = []
    for _ in range(count):
        at += rng.expovariate(4.0)
        prompt = min(8000, max(4, round(rng.lognormvariate(6.0, 1.0))))
        requests.append(Request(at, prompt, min(400, max(1, round(rng.lognormvariate(3.7, 0.8))))))
    policy = _load(_WORLD)
    world = world_of(policy)
    begun = time.perf_counter()
    report = summarize(simulate(policy, requests, world, route="chat"), world)
    seconds = time.perf_counter() - begun
    return {
        "requests": count,
        "seconds": round(seconds, 1),
        "us_per_request": round(seconds / count * 1e6, 1),
        "seconds_for_a_million": round(seconds / count * 1e6, 1),
        "goals_met": round(report.total.attainment, 4),
        "own_share": round(report.total.targets.get("tiny", 0.0), 3),
    }


# --- adapt ------------------------------------------------------------------------------------------------

_TWO = """\
version: 1
providers:
  api: {type: openai}
targets:
  cheap: {provider: api, model: c, price: {input: 0.1, output: 0.4},
          speed: {ttft_ms: 500, ttft_ms_per_1k: 200, tpot_ms: 12, spread: 0.25}}
  dear:  {provider: api, model: d, price: {input: 1.0, output: 4.0},
          speed: {ttft_ms: 350, ttft_ms_per_1k: 80, tpot_ms: 10, spread: 0.25}}
routes:
  chat: [{candidates: [CANDIDATES], choose: CHOOSE}]
"""
_SLOW = Speed(ttft_ms=1000.0, ttft_ms_per_1k=400.0, tpot_ms=12.0, spread=0.25)
_FAST = Speed(ttft_ms=500.0, ttft_ms_per_1k=200.0, tpot_ms=12.0, spread=0.25)


def _traffic(count: int) -> list[Request]:
    rng, at, requests = random.Random(1), 0.0, []
    for _ in range(count):
        at += rng.expovariate(2.0)
        requests.append(Request(at, min(6000, max(10, round(rng.lognormvariate(6.5, 1.0)))), rng.randint(20, 200)))
    return requests


def _replay(choose: str, requests: list[Request], candidates: str = "cheap, dear") -> list[Outcome]:
    policy = _load(_TWO.replace("CANDIDATES", candidates).replace("CHOOSE", choose))
    world = world_of(policy)
    third = requests[-1].at_s / 3
    changing = World(world.targets, world.clusters, ((third, "cheap", _SLOW), (2 * third, "cheap", _FAST)))
    return simulate(policy, requests, changing, route="chat", goals=Goals(ttft_ms=_GOAL_MS))


def _brier(outcomes: list[Outcome]) -> dict[str, float]:
    """Mean squared errors of what our predictor said, and of moving averages over the same answers (weight 0.1): of the
    time to the first token, which says yes or no, and of whether the goal was met."""
    ours, by_time, by_met = [], [], []
    time_ms: dict[str, float] = {}
    met_share: dict[str, float] = {}
    for one in outcomes:
        assert one.target is not None and one.ttft_s is not None
        met = float(one.met)
        if one.predicted is not None and one.target in time_ms:
            ours.append((one.predicted - met) ** 2)
            by_time.append((float(time_ms[one.target] <= _GOAL_MS) - met) ** 2)
            by_met.append((met_share[one.target] - met) ** 2)
        before = time_ms.get(one.target, one.ttft_s * 1000)
        time_ms[one.target] = before + 0.1 * (one.ttft_s * 1000 - before)
        share = met_share.get(one.target, met)
        met_share[one.target] = share + 0.1 * (met - share)
    return {
        name: round(sum(errors) / len(errors), 4)
        for name, errors in (("ours", ours), ("average_of_times", by_time), ("average_of_met", by_met))
    }


def run_adapt(quick: bool) -> dict[str, Any]:
    requests = _traffic(3_000 if quick else 20_000)
    slo = f"slo: {{ttft_ms: {_GOAL_MS:g}, at: p90}}"
    ways = {
        "cheapest-meeting-slo": _replay(f"cheapest-meeting-slo, {slo}", requests),
        "most-likely-to-meet-slo": _replay(f"most-likely-to-meet-slo, {slo}", requests),
        "lowest-latency": _replay("lowest-latency", requests),
        "cheap alone": _replay("in-order", requests, "cheap"),
        "dear alone": _replay("in-order", requests, "dear"),
    }
    found: dict[str, Any] = {
        name: {
            "goals_met": round(sum(one.met for one in outcomes) / len(outcomes), 4),
            "cost_usd": round(sum(one.cost_usd or 0.0 for one in outcomes), 4),
            "cheap_share": round(sum(one.target == "cheap" for one in outcomes) / len(outcomes), 3),
        }
        for name, outcomes in ways.items()
    }
    # Calibration is judged where nothing is chosen by it: each target is asked for every other request.
    found["brier"] = brier = _brier(_replay("round-robin", requests))
    found["brier_better_than_average_of_times"] = round(1 - brier["ours"] / brier["average_of_times"], 3)
    found["brier_better_than_average_of_met"] = round(1 - brier["ours"] / brier["average_of_met"], 3)
    return found


PARTS = {
    "decide": run_decide,
    "simulate": run_simulate,
    "adapt": run_adapt,
    "tokens": run_tokens,
    "reality": run_reality,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--only", metavar="PART,…", default=",".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick}
    for name in progress(chosen, "policy"):
        results[name] = PARTS[name](arguments.quick)
    for name in chosen:
        rows = [
            (key, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
            for key, value in results[name].items()
        ]
        show(name, ("", "measured"), rows)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
