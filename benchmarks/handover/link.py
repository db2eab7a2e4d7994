"""A slow link between prefill and decode: when the decode worker's first token comes, with raw KV and with the adaptive
codec.

The decode worker runs in a network namespace of its own; `tc` limits what reaches it. That takes root and iproute2;
where they are missing this part is skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from backends.disagg.cluster import Cluster
from backends.disagg.lives import LocalLife
from benchmarks.handover.clusters import Prompts, asking, options, running
from benchmarks.report import percentile, progress

_NAMESPACE = "splitroute-bench"
_OUTSIDE, _INSIDE = "10.213.7.1", "10.213.7.2"
PROMPT = 1500
RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}


def why_not() -> str | None:
    """Why no link can be shaped here; None where it can."""
    if os.getuid() != 0:
        return "network namespaces take root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "ip and tc (iproute2) are not installed"
    try:
        with shaped("100mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} failed: {error.stderr.strip()}"


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def shaped(rate: str) -> Iterator[None]:
    """A namespace that is reached at `rate`."""
    subprocess.run(["ip", "netns", "del", _NAMESPACE], check=False, capture_output=True)
    _do("ip", "netns", "add", _NAMESPACE)
    try:
        _do("ip", "link", "add", "srbench0", "type", "veth", "peer", "name", "srbench1", "netns", _NAMESPACE)
        _do("ip", "addr", "add", f"{_OUTSIDE}/30", "dev", "srbench0")
        _do("ip", "link", "set", "srbench0", "up")
        inside = ("ip", "netns", "exec", _NAMESPACE)
        _do(*inside, "ip", "addr", "add", f"{_INSIDE}/30", "dev", "srbench1")
        _do(*inside, "ip", "link", "set", "srbench1", "up")
        _do("tc", "qdisc", "add", "dev", "srbench0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        yield
    finally:
        subprocess.run(["ip", "link", "del", "srbench0"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", _NAMESPACE], check=False, capture_output=True)


def _apart(cluster: Cluster) -> None:
    """Put the decode worker behind the link, and let it keep nothing: whatever it needs has to cross."""
    for worker in cluster.prefill:
        worker.config = msgspec.structs.replace(worker.config, kv_host=_OUTSIDE)
    for worker in cluster.decode:
        worker.config = msgspec.structs.replace(worker.config, kv_host=_INSIDE, prefix_cache=False)
        worker.life = LocalLife(("ip", "netns", "exec", _NAMESPACE))


async def measure(model: str, codec: str, rounds: int, prompts: Prompts) -> dict[str, Any]:
    async with running(options(model, transport="tcp", kv_codec=codec), _apart) as cluster:
        new: list[float] = []
        again: list[float] = []
        codecs: set[str] = set()
        await _until_decoded(cluster, prompts.next(PROMPT), codecs)  # the link's speed is learned from it
        codecs.clear()
        for _ in range(rounds):
            prompt = prompts.next(PROMPT)
            new.append(await _until_decoded(cluster, prompt, codecs))
            again.append(await _until_decoded(cluster, prompt, codecs))
        together = [prompts.next(PROMPT) for _ in range(4)]
        crowd = await asyncio.gather(*(_until_decoded(cluster, prompt, codecs) for prompt in together))
        return {
            "new_s": round(percentile(new, 0.5), 3),
            "cached_s": round(percentile(again, 0.5), 3),
            "four_at_once_s": round(sum(crowd) / len(crowd), 3),
            "codecs": sorted(codecs),
        }


async def _until_decoded(cluster: Cluster, prompt: list[int], codecs: set[str]) -> float:
    """Seconds until the first token that the decode worker gives: the answer's second."""
    begun = time.perf_counter()
    with asking(cluster, prompt, 3) as generation:
        async for token in generation:
            if token.index == 1:
                took = time.perf_counter() - begun
        assert generation.transfer is not None
        codecs.add(generation.transfer.codec)
        return took


def run(model: str, quick: bool) -> dict[str, Any]:
    """Per rate: seconds until the decode worker's first token, for new prompts, for prompts whose KV the prefill worker
    has cached, and for four new ones at once."""
    if (reason := why_not()) is not None:
        print(f"skipped: a shaped link, because {reason}")
        return {"skipped": reason}
    result: dict[str, Any] = {}
    prompts = Prompts(model)
    for name, rate in progress(list(RATES.items()), "a slow link"):
        with shaped(rate):
            raw = asyncio.run(measure(model, "raw", 2 if quick else 5, prompts))
            adaptive = asyncio.run(measure(model, "auto", 2 if quick else 5, prompts))
        ratios = {key: round(raw[key] / adaptive[key], 2) for key in raw if key.endswith("_s")}
        result[name] = {"raw": raw, "adaptive": adaptive, "raw_over_adaptive": ratios}
    return result
