"""A simulation beside what it simulates: requests shaped like Azure's conversations, at real speed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import policies
from backends.options import PROVIDER_OPTIONS
from benchmarks.report import percentile
from policies import Goals
from policies.simulate import Request, simulate, world_of

_POLICY = """\
version: 1
providers:
  own: {type: disagg, model: smollm2-135m, prefill: 1, decode: 1, disaggregate: DISAGGREGATE, threads: 1, pin: true}
targets:
  own: {provider: own, SPEED}
routes:
  chat: [{candidates: [own], choose: in-order}]
resilience: {ttft_timeout_ms: 120000, idle_timeout_ms: 60000, deadline_ms: 300000}
"""
_GOALS = Goals(ttft_ms=1500.0, tpot_ms=30.0)
_PER_SECOND = 0.5
_VOCABULARY = 49152
_RESERVED = 64
"""Token ids below are marks of the chat template."""


def _requests(count: int, seed: int) -> list[Request]:
    """Lengths as in Azure's 2023 conversation trace (log-normal fits: medians 1,020 and 129 tokens), cut to what the
    model's context and one core allow; arrivals as a Poisson process."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(_PER_SECOND)
        prompt = min(3000, max(16, round(rng.lognormvariate(6.5, 0.9))))
        found.append(Request(at, prompt, min(300, max(2, round(rng.lognormvariate(4.6, 0.6))))))
    return found


@contextlib.contextmanager
def _serving(policy: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.yaml"
        file.write_text(policy)
        command = [sys.executable, "-m", "router.cli", "up", "--policy", str(file), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"serving (http://\S+)/v1", line):
                    break
            else:
                raise RuntimeError("splitroute up ended before it served")
            yield found[1]
        finally:
            process.terminate()
            process.wait(30)


async def _ask(client: httpx.AsyncClient, request: Request, begun: float, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and for each one after it."""
    await asyncio.sleep(begun + request.at_s - time.monotonic())
    body = {
        "model": "chat",
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    sent, first, last = time.monotonic(), None, 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                last = time.monotonic()
                first = last if first is None else first
    assert first is not None
    return first - sent, (last - first) / max(1, request.output_tokens - 1)


async def _replay(url: str, requests: list[Request], seed: int) -> list[tuple[float, float]]:
    """What each request saw."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(_RESERVED, _VOCABULARY) for _ in range(one.prompt_tokens)] for one in requests]
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        begun = time.monotonic() + 0.5
        return await asyncio.gather(
            *(_ask(client, one, begun, prompt) for one, prompt in zip(requests, prompts, strict=True))
        )


def _speed(url: str) -> dict[str, float]:
    """As the workers have learned it so far: of prompts by who computes them, of decode steps by who does those."""
    workers = httpx.get(f"{url}/health").json()["providers"]["own"]["workers"]
    by_role = {worker["role"]: worker["speed"] for worker in workers}
    return {name: by_role["prefill" if name.startswith("prompt") else "decode"][name] for name in by_role["decode"]}


def _figures(times: list[tuple[float, float]]) -> dict[str, float]:
    assert _GOALS.ttft_ms is not None and _GOALS.tpot_ms is not None
    met = [ttft_s * 1000 <= _GOALS.ttft_ms and tpot_s * 1000 <= _GOALS.tpot_ms for ttft_s, tpot_s in times]
    ttfts, tpots = [ttft_s for ttft_s, _ in times], [tpot_s for _, tpot_s in times]
    return {
        "goals_met": round(sum(met) / len(met), 3),
        "ttft_p50_ms": round(percentile(ttfts, 0.5) * 1000),
        "ttft_p90_ms": round(percentile(ttfts, 0.9) * 1000),
        "tpot_p50_ms": round(percentile(tpots, 0.5) * 1000, 1),
        "tpot_p90_ms": round(percentile(tpots, 0.9) * 1000, 1),
    }


def run_reality(quick: bool) -> dict[str, Any]:
    requests = _requests(40 if quick else 300, seed=3)
    results: dict[str, Any] = {}
    for disaggregate in ("always", "adaptive"):
        text = _POLICY.replace("DISAGGREGATE", disaggregate)
        with _serving(text.replace(", SPEED", "")) as url:
            asyncio.run(_replay(url, _requests(30, seed=5), seed=6))
            speed = _speed(url)
            seen = asyncio.run(_replay(url, requests, seed=4))
        declared = ", ".join(f"{name}: {value:.4f}" for name, value in speed.items())
        text = text.replace("SPEED", f"speed: {{{declared}, transfer_ms_per_1k: 3, spread: 0.02}}")
        policy = policies.load(text, filename="reality.yaml", env={}, provider_types=PROVIDER_OPTIONS)
        outcomes = simulate(policy, requests, world_of(policy), route="chat", goals=_GOALS)
        real = _figures(seen)
        simulated = _figures([(one.ttft_s or 0.0, one.tpot_s or 0.0) for one in outcomes])
        results |= {
            f"{disaggregate}: learned": speed,
            f"{disaggregate}: real": real,
            f"{disaggregate}: simulated": simulated,
            f"{disaggregate}: off by": {
                "goals_met_points": round(abs(real["goals_met"] - simulated["goals_met"]) * 100, 1),
                **{
                    f"{name}_relative": round(simulated[f"{name}_ms"] / real[f"{name}_ms"] - 1, 3)
                    for name in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
                },
            },
        }
    return results
