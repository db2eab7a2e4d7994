"""64 clients that each ask again as soon as they are answered: with a promised time per token, and without one.

With one, how many of the gaps between tokens keep it. Without, how the throughput of the batch that the scheduler
chooses compares with the best fixed batch. `python -m benchmarks.engines.promises MODEL PARAMETERS_JSON`
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from backends.disagg.engine.engine import Engine
from backends.disagg.engine.sequence import SamplingParams, Sequence
from benchmarks.engines.load import Parameters, drive
from benchmarks.engines.ours import make_engine
from benchmarks.report import percentile

CLIENTS = 64
BUDGET_S = 0.060
SETTLE_S = 15.0
SECONDS = 25.0
BATCHES = (4, 8, 16, 32, 64)


def clients(engine: Engine, tpot_s: float | None, seed: int) -> dict[str, Any]:
    """Serve the clients for a while; the gaps between tokens, and tokens/s. Another seed gives other prompts."""
    rng = random.Random(seed)
    last: dict[int, float] = {}
    submitted: dict[int, float] = {}
    gaps: list[float] = []
    waits: list[float] = []
    batches: list[int] = []
    next_id = 0

    def ask(now: float) -> None:
        nonlocal next_id
        next_id += 1
        prompt = [rng.randrange(10, 40000) for _ in range(rng.randint(50, 200))]
        params = SamplingParams(max_tokens=rng.randint(64, 192))
        engine.scheduler.add(Sequence(next_id, prompt, params, tpot_s=tpot_s, deadline=now + 10.0))
        submitted[next_id] = now

    start = time.perf_counter()
    for _ in range(CLIENTS):
        ask(start)
    tokens = 0
    measuring_from = start + SETTLE_S
    while (now := time.perf_counter()) < measuring_from + SECONDS:
        result = engine.step()
        done = time.perf_counter()
        counts = done >= measuring_from
        if counts:
            tokens += len(result.tokens)
            batches.append(len(result.tokens))
        for out in result.tokens:
            if out.index == 0:
                waits.append(done - submitted.pop(out.seq.id))
            elif counts:
                gaps.append(done - last[out.seq.id])
            last[out.seq.id] = done
            if out.finish_reason is not None:
                del last[out.seq.id]
                ask(done)
    elapsed = now - measuring_from
    for seq in list(engine.scheduler.sequences.values()):
        engine.scheduler.finish(seq)
    return {
        "tokens_per_s": round(tokens / elapsed, 1),
        "mean_batch": round(statistics.mean(batches), 1),
        "gap_p50_ms": round(percentile(gaps, 0.5) * 1000, 1),
        "gap_p95_ms": round(percentile(gaps, 0.95) * 1000, 1),
        "gap_p99_ms": round(percentile(gaps, 0.99) * 1000, 1),
        "within": round(sum(gap <= BUDGET_S for gap in gaps) / len(gaps), 4),
        "ttft_p50_s": round(statistics.median(waits), 2),
    }


def promises(model: str, parameters: Parameters) -> dict[str, Any]:
    engine, _ = make_engine(model, parameters, CLIENTS * 640)
    kept = clients(engine, BUDGET_S, seed=0)
    free = clients(engine, None, seed=1)
    sweep = {}
    for batch in BATCHES:
        engine.scheduler.max_batch = batch
        sweep[str(batch)] = clients(engine, None, seed=1 + batch)["tokens_per_s"]
    return {
        "budget_ms": BUDGET_S * 1000,
        "clients": CLIENTS,
        "with_budget": kept,
        "without": free,
        "sweep_tokens_per_s": sweep,
        "of_best": round(free["tokens_per_s"] / max(sweep.values()), 3),
    }


if __name__ == "__main__":
    drive(promises)
