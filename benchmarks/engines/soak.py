"""2,000 mixed requests through a pool too small for them: are all blocks free afterwards, how much memory was it?

`python -m benchmarks.engines.soak MODEL PARAMETERS_JSON`
"""

from __future__ import annotations

import random
import resource
from typing import Any

from backends.disagg.engine.sequence import SamplingParams, Sequence, Status
from benchmarks.engines.load import Parameters, drive
from benchmarks.engines.ours import make_engine

REQUESTS = 2000
KV_TOKENS = 1024
ALLOWANCE_MB = 400


def soak(model: str, parameters: Parameters) -> dict[str, Any]:
    engine, weights = make_engine(model, parameters, KV_TOKENS, max_model_len=512)
    scheduler, rng = engine.scheduler, random.Random(0)
    prefixes = [[rng.randrange(10, 40000) for _ in range(80)] for _ in range(5)]
    asked = finished = aborted = preempted = cached = 0
    while asked < REQUESTS or scheduler.sequences:
        while asked < REQUESTS and len(scheduler.sequences) < 64:
            asked += 1
            prompt = [rng.randrange(10, 40000) for _ in range(rng.randint(1, 60))]
            if rng.random() < 0.5:
                prompt = rng.choice(prefixes)[: rng.randint(1, 80)] + prompt
            temperature, top_p = rng.choice([(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)])
            params = SamplingParams(rng.randint(1, 40), temperature, top_p, seed=asked)
            tpot_s = rng.choice([*[None] * 9, 0.05])
            scheduler.add(
                Sequence(asked, prompt, params, prefill_only=rng.random() < 0.1, tpot_s=tpot_s, deadline=asked)
            )
        result = engine.step()
        preempted += sum(seq.status is Status.SWAPPED for seq in scheduler.swapped)
        for out in result.tokens:
            finished += out.finish_reason is not None
            cached += out.seq.cached if out.index == 0 else 0
            if out.seq.status is Status.HELD:  # its KV has been taken by another worker
                scheduler.finish(out.seq)
                finished += 1
        if rng.random() < 0.1 and scheduler.sequences:
            scheduler.finish(rng.choice(list(scheduler.sequences.values())))
            aborted += 1
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    expected_mb = (
        weights * (1 if parameters.quantization == "int8" else 2) + KV_TOKENS * engine.geometry.token_bytes
    ) / 1e6
    return {
        "requests": asked,
        "finished": finished,
        "aborted": aborted,
        "steps_with_somebody_swapped_out": preempted,
        "cached_prompt_tokens": cached,
        "blocks": scheduler.pool.num_blocks,
        "blocks_free": scheduler.pool.free_count,
        "peak_mb": round(peak_mb),
        "weights_and_kv_mb": round(expected_mb),
        "over_mb": round(peak_mb - expected_mb),
        "allowed_mb": ALLOWANCE_MB,
    }


if __name__ == "__main__":
    drive(soak)
