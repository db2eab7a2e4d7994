"""Many requests at once over providers that fail, refuse, dawdle or are too few."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.asking import Outcome, ask
from benchmarks.faults.crowd import crowd
from benchmarks.faults.servers import chaos, splitroute
from benchmarks.report import percentile
from router.chaos import TEXT, FakeProvider
from router.gateway.server import run


def _policy(url: str, targets: str, rule: str, resilience: str) -> str:
    return f"""
version: 1
providers: {{chaos: {{type: openai, base_url: "{url}", api_key: k}}}}
targets:
{targets}
classes:
  batch: {{when: {{metadata: {{job: nightly}}}}, priority: -1}}
  default: {{}}
routes: {{chat: [{rule}]}}
resilience: {resilience}
"""


def _two(model: str, more: str = "") -> str:
    return "\n".join(f"  t{n}: {{provider: chaos, model: {model!r}{more}}}" for n in range(2))


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


def _resident_mib(process: subprocess.Popen[bytes]) -> float:
    text = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else 0.0


async def _many(client: httpx.AsyncClient, count: int, at_once: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            outcomes.append(await ask(client, "chat", stream=True, expected=TEXT))

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return outcomes


def _in_flight(url: str) -> float:
    text = httpx.get(url + "/metrics").text
    found = re.search(r"^splitroute_requests_in_flight (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def run_mixed(quick: bool) -> dict[str, Any]:
    """1,000 at once where 30 % fail in turn by reset, 500, a cut and silence; then memory over 20,000."""
    deadline_ms, many = 8000, 2000 if quick else 20000
    timers = ", ".join(f"{name}_timeout_ms: 2000" for name in ("ttft", "attempt", "idle"))
    resilience = f"{{retries: 3, {timers}, deadline_ms: {deadline_ms}}}"
    with chaos() as provider:
        policy = _policy(provider, _two("percent:30"), "{candidates: [t0, t1], choose: in-order}", resilience)

        async def go(url: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for stream in (True, False):
                outcomes = await crowd(url, 1000, 1000, stream=stream, expected=TEXT)
                found["1,000 streamed" if stream else "1,000 whole"] = {
                    **Counter(one.kind for one in outcomes),
                    "statuses": dict(Counter(one.status for one in outcomes if one.status >= 400)),
                    "longest_s": round(max(one.seconds for one in outcomes), 2),
                    "deadline_s": deadline_ms / 1000,
                }
            resident = {}
            for at in range(5):
                outcomes = await crowd(url, many // 5, 200, stream=True, expected=TEXT)
                resident[f"after {many // 5 * (at + 1)}"] = round(_resident_mib(process), 1)
                found[f"{many // 5 * at} to {many // 5 * (at + 1)}"] = dict(Counter(one.kind for one in outcomes))
            found["resident_mib"] = resident
            found["in_flight_afterwards"] = _in_flight(url)
            return found

        with splitroute(policy) as (url, process):
            return run(go(url, process))


def run_hammer(quick: bool) -> dict[str, Any]:
    """429 without end at two targets of one quota, and 20 clients that ask again at once."""
    seconds, clients, open_s, most_s = 5 if quick else 60, 20, 1.0, 8.0
    breaker = f"{{failures: 5, open_ms: {open_s * 1000:.0f}, most_ms: {most_s * 1000:.0f}}}"
    with FakeProvider() as provider:
        policy = _policy(
            provider.url,
            _two("bare:429", ", limits: {quota: team}"),
            "{candidates: [t0, t1], choose: round-robin}",
            f"{{retries: 3, deadline_ms: 500, breaker: {breaker}}}",
        )

        async def go(url: str) -> int:
            until, asked = time.monotonic() + seconds, 0
            async with _client(url) as client:

                async def worker() -> None:
                    nonlocal asked
                    while time.monotonic() < until:
                        outcome = await ask(client, "chat", stream=False, expected=TEXT)
                        asked += 1
                        if outcome.status not in (429, 503):
                            raise SystemExit(f"hammer: {outcome} where 429 or 503 was due")

                await asyncio.gather(*(worker() for _ in range(clients)))
            return asked

        with splitroute(policy) as (url, _):
            asked = asyncio.run(go(url))
        bound, at, wait = clients, 0.0, open_s  # who was under way when it opened, then one a probe
        while at < seconds:
            bound, at, wait = bound + 1, at + wait, min(wait * 2, most_s)
        return {"seconds": seconds, "requests": asked, "attempts": len(provider.requests), "bound": bound}


def run_hedge(quick: bool) -> dict[str, Any]:
    """Two in a hundred answers begin 400 ms late instead of 20."""
    count = 400 if quick else 3000
    found: dict[str, Any] = {}
    for name, hedge in (("without", ""), ("with", ", hedge: {percent: 5}")):
        with FakeProvider(kept=1) as provider:
            rule = "{candidates: [t0, t1], choose: in-order}"
            policy = _policy(provider.url, _two("tail:2"), rule, f"{{deadline_ms: 5000{hedge}}}")

            async def go(url: str, provider: FakeProvider = provider) -> dict[str, Any]:
                async with _client(url) as client:
                    await _many(client, 200, 4)  # what is usual has to be known before what is slow
                    provider.forget()
                    outcomes = await _many(client, count, 4)
                asked = provider.count("tail") - 1
                ttft = [1000 * one.ttft_s for one in outcomes if one.ttft_s is not None]
                return {
                    "whole": sum(one.kind == "whole" for one in outcomes),
                    "ttft_p50_ms": round(percentile(ttft, 0.5), 1),
                    "ttft_p99_ms": round(percentile(ttft, 0.99), 1),
                    "more_requests_percent": round(100 * (asked / count - 1), 2),
                }

            with splitroute(policy) as (url, _):
                found[name] = asyncio.run(go(url))
    found["p99_times_lower"] = round(found["without"]["ttft_p99_ms"] / found["with"]["ttft_p99_ms"], 2)
    return found


def run_overload(quick: bool) -> dict[str, Any]:
    """A target for 80 requests a second: 24 of people's, then those and 216 of a nightly job's."""
    seconds, goal_s, people, batch = 4 if quick else 20, 0.4, 24, 216
    found: dict[str, Any] = {}
    with FakeProvider(kept=1) as provider:
        targets = "  t0: {provider: chaos, model: 'busy:100', limits: {concurrency: 8, queue: 64}}"
        policy = _policy(provider.url, targets, "{candidates: [t0], choose: in-order}", "{deadline_ms: 2000}")

        async def go(url: str, rates: Sequence[tuple[str, int]]) -> dict[str, list[Outcome]]:
            draw, begun = random.Random(7), time.monotonic()
            async with _client(url) as client:

                async def one(at: float, kind: str) -> tuple[str, Outcome]:
                    await asyncio.sleep(begun + at - time.monotonic())
                    more = {"metadata": {"job": "nightly"}} if kind == "batch" else {}
                    return kind, await ask(client, "chat", stream=False, expected=TEXT, **more)

                due: list[Awaitable[tuple[str, Outcome]]] = []
                for kind, rate in rates:
                    at = draw.expovariate(rate)
                    while at < seconds:
                        due.append(one(at, kind))
                        at += draw.expovariate(rate)
                outcomes: dict[str, list[Outcome]] = {kind: [] for kind, _ in rates}
                for kind, outcome in await asyncio.gather(*due):
                    outcomes[kind].append(outcome)
            return outcomes

        with splitroute(policy) as (url, _):
            for name, rates in (
                ("uncongested", [("people", people)]),
                ("overload", [("people", people), ("batch", batch)]),
            ):
                for kind, outcomes in asyncio.run(go(url, rates)).items():
                    kinds = Counter(one.kind for one in outcomes)
                    good = sum(one.kind == "whole" and one.seconds <= goal_s for one in outcomes)
                    found[f"{name}: {kind}"] = {
                        "asked": len(outcomes),
                        **kinds,
                        "goodput_per_s": round(good / seconds, 2),
                    }
                    if kind == "people":
                        found[f"{name}: {kind}"]["good_share"] = round(good / len(outcomes), 4)
    kept = found["overload: people"]["good_share"] / found["uncongested: people"]["good_share"]
    found["interactive_goodput_kept_percent"] = round(100 * kept, 2)
    return found
