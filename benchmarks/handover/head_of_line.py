"""Head-of-line blocking: streams that decode while long prompts arrive, split against unified.

Four streams decode; meanwhile prompts of 1,500 tokens arrive one after another. Measured are the streams' inter-token
times, the long prompts' time to first token, and what of the hand-over can be seen. All modes run the same engine on
the same cores; unified once with chunked prefill, once with whole prompts in one step.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from backends.disagg.cluster import Cluster
from backends.disagg.transfer.nixl import installed
from backends.options import DisaggOptions
from benchmarks.handover.clusters import Prompts, asking, options, running
from benchmarks.report import progress, spread

STREAMS = 4
STREAM_PROMPT = 128
LONG_PROMPT = 1500
MODES: dict[str, dict[str, Any]] = {
    "split, shm": {"transport": "shm"},
    "split, tcp": {"transport": "tcp"},
    "split, nixl": {"transport": "nixl"},
    "unified": {"mode": "unified"},
    "unified, not chunked": {"mode": "unified", "prefill_chunk": 2048},
}


@dataclass
class Measured:
    gaps_ms: list[float] = field(default_factory=list)
    """Inter-token times of the streams while long prompts were being served."""
    long_ttft_s: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    kv_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "itl_ms": spread(self.gaps_ms),
            "long_ttft_s": round(sum(self.long_ttft_s) / len(self.long_ttft_s), 3),
            "long_ttft_max_s": round(max(self.long_ttft_s), 3),
            "gaps": len(self.gaps_ms),
        }
        if self.exposed_ms:
            facts["kv_exposed_ms"] = spread(self.exposed_ms)
            facts["kv_bytes_per_prompt"] = self.kv_bytes // len(self.exposed_ms)
        return facts


async def _stream(cluster: Cluster, prompt: list[int], arrivals: list[float], stop: asyncio.Event) -> None:
    """Decode until `stop`, noting when each token arrived."""
    with asking(cluster, prompt, 4096) as generation:
        async for _ in generation:
            arrivals.append(time.perf_counter())
            if stop.is_set():
                return


async def _long_prompt(cluster: Cluster, prompt: list[int], measured: Measured) -> None:
    started = time.perf_counter()
    with asking(cluster, prompt, 4) as generation:
        async for token in generation:
            if token.index == 0:
                measured.long_ttft_s.append(time.perf_counter() - started)
    if generation.transfer is not None:
        measured.exposed_ms.append(generation.transfer.exposed_s * 1000)
        measured.kv_bytes += generation.transfer.bytes


async def measure(chosen: DisaggOptions, count: int, name: str) -> dict[str, Any]:
    """Run the load against one mode and measure it."""
    prompts = Prompts(chosen.model)
    async with running(chosen) as cluster:
        await _long_prompt(cluster, prompts.next(LONG_PROMPT), Measured())
        stop = asyncio.Event()
        arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(_stream(cluster, prompts.next(STREAM_PROMPT), times, stop)) for times in arrivals
        ]
        while not all(len(times) > 8 for times in arrivals):  # noqa: ASYNC110 - a benchmark may poll
            await asyncio.sleep(0.05)
        measured = Measured()
        begun = time.perf_counter()
        for _ in progress(range(count), name):
            await _long_prompt(cluster, prompts.next(LONG_PROMPT), measured)
        ended = time.perf_counter()
        stop.set()
        await asyncio.gather(*streams)
        for times in arrivals:
            inside = [at for at in times if begun <= at <= ended]
            measured.gaps_ms += [(b - a) * 1000 for a, b in itertools.pairwise(inside)]
        return measured.summary()


def run(model: str, quick: bool, dtype: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, changes in MODES.items():
        if changes.get("transport") == "nixl" and installed() is None:
            print("split, nixl: not measured, for NIXL is not installed: pip install 'splitroute[nixl]'")
            continue
        chosen = options(model, dtype=dtype, **changes)
        result[name] = asyncio.run(measure(chosen, 4 if quick else 20, name))
    split, unified = result["split, shm"], result["unified"]
    whole = result["unified, not chunked"]
    result["ratios"] = {
        "split_p99_over_its_p50": round(split["itl_ms"]["p99"] / split["itl_ms"]["p50"], 3),
        "split_p99_over_unified_p99": round(split["itl_ms"]["p99"] / unified["itl_ms"]["p99"], 4),
        "split_p99_over_unchunked_p99": round(split["itl_ms"]["p99"] / whole["itl_ms"]["p99"], 4),
        "split_long_ttft_over_unified": round(split["long_ttft_s"] / unified["long_ttft_s"], 3),
    }
    return result
