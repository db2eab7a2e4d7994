"""Head-of-line blocking: streams that decode while long prompts arrive, split (P/D) against unified.

Four streams decode; meanwhile prompts of 1,500 tokens arrive one after another. Printed for both modes of
the bundled cluster on the same cores: the streams' inter-token latency, the long prompts' time to first
token, and what the KV hand-over cost. Both modes run the same engine; unified uses chunked prefill.

    python -m benchmarks.disagg --quick --json results.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.disagg.backend import worker_configs
from backends.disagg.cluster import Cluster
from backends.disagg.messages import Sampling
from backends.models import fingerprint, load_config, load_tokenizer, resolve
from backends.options import DisaggOptions
from benchmarks.report import machine, show, spread, write_json

STREAMS = 4
STREAM_PROMPT = 128
LONG_PROMPT = 1500


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


def sampling(max_tokens: int) -> Sampling:
    """Greedy, and never ended by the model: every stream runs its full length."""
    return Sampling(max_tokens=max_tokens, temperature=0.0, top_p=1.0, seed=0, stop_ids=[])


async def stream(cluster: Cluster, prompt: list[int], arrivals: list[float], stop: asyncio.Event) -> None:
    """Decode until `stop`, noting when each token arrived."""
    generation = cluster.submit(prompt, sampling(4096))
    try:
        async for _ in generation:
            arrivals.append(time.perf_counter())
            if stop.is_set():
                return
    finally:
        cluster.end(generation)


async def long_prompt(cluster: Cluster, prompt: list[int], measured: Measured) -> None:
    started = time.perf_counter()
    generation = cluster.submit(prompt, sampling(4))
    try:
        first = True
        async for _ in generation:
            if first:
                measured.long_ttft_s.append(time.perf_counter() - started)
                first = False
    finally:
        cluster.end(generation)
    if generation.transfer is not None:
        measured.exposed_ms.append(generation.transfer.exposed_s * 1000)
        measured.kv_bytes += generation.transfer.bytes


async def measure(options: DisaggOptions, prompts: int, vocabulary: list[int]) -> Measured:
    """Run the load against one mode and measure it."""
    files = resolve(options.model, pull_missing=True)
    context = load_config(files).max_position_embeddings
    cluster = Cluster(*worker_configs(options, files, fingerprint(files), context))
    await cluster.start(options.start_timeout_s)
    rng = random.Random(0)
    try:
        warm = Measured()
        await long_prompt(cluster, rng.choices(vocabulary, k=LONG_PROMPT), warm)
        stop = asyncio.Event()
        arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(stream(cluster, rng.choices(vocabulary, k=STREAM_PROMPT), times, stop))
            for times in arrivals
        ]
        while not all(len(times) > 8 for times in arrivals):  # noqa: ASYNC110 - a benchmark may poll
            await asyncio.sleep(0.05)
        measured = Measured()
        begun = time.perf_counter()
        for _ in range(prompts):
            await long_prompt(cluster, rng.choices(vocabulary, k=LONG_PROMPT), measured)
        ended = time.perf_counter()
        stop.set()
        await asyncio.gather(*streams)
        for times in arrivals:
            inside = [at for at in times if begun <= at <= ended]
            measured.gaps_ms += [(b - a) * 1000 for a, b in itertools.pairwise(inside)]
        return measured
    finally:
        await cluster.aclose()


def run(model: str, transport: str, dtype: str, prompts: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(resolve(model, pull_missing=True))
    vocabulary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.eos_token_ids]
    results: dict[str, Any] = {"machine": machine(), "model": model, "transport": transport, "dtype": dtype}
    for name, mode in (("pd", "split"), ("unified", "unified")):
        print(f"measuring {name} ({prompts} prompts of {LONG_PROMPT} tokens)…", flush=True)
        options = DisaggOptions(model=model, mode=mode, transport=transport, dtype=dtype, pin=True)
        results[name] = asyncio.run(measure(options, prompts, vocabulary)).summary()
    results["itl_p99_ratio"] = round(results["pd"]["itl_ms"]["p99"] / results["unified"]["itl_ms"]["p99"], 4)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disagg",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="4 long prompts a mode instead of 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    arguments = parser.parse_args()
    prompts = 4 if arguments.quick else 20
    results = run(arguments.model, arguments.transport, arguments.dtype, prompts)
    rows = []
    for name in ("pd", "unified"):
        one = results[name]
        itl, kv = one["itl_ms"], one.get("kv_exposed_ms", {})
        exposed = f"{kv['p50']:.1f} / {kv['p99']:.1f}" if kv else "–"
        rows.append([name, itl["p50"], itl["p99"], itl["max"], f"{one['long_ttft_s']:.2f}", exposed, one["gaps"]])
    show(
        f"{STREAMS} streams decoding while {LONG_PROMPT}-token prompts arrive",
        ["mode", "ITL p50 ms", "p99 ms", "max ms", "long TTFT s", "KV exposed p50 / p99 ms", "gaps"],
        rows,
    )
    print(f"P/D inter-token p99 ÷ unified's: {results['itl_p99_ratio']}")
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
