"""Steps made up at start to learn how long steps take here; they also touch every kernel once."""

from __future__ import annotations

import time

from backends.disagg.engine.blocks import BlockPool
from backends.disagg.engine.runner import Runner
from backends.disagg.engine.scheduler import Chunk, Step
from backends.disagg.engine.sequence import SamplingParams, Sequence
from backends.disagg.engine.step_time import StepLoad, pairs

_LOADS = (
    StepLoad(1, 16),
    StepLoad(prompt=128, pairs=pairs(0, 128)),
    StepLoad(16, 16 * 16),
    StepLoad(8, 8 * 256),
    StepLoad(prompt=64, pairs=pairs(1024, 64)),
    StepLoad(8, 8 * 16, 32, pairs(0, 32)),
    StepLoad(1, 512),
    StepLoad(8, 8 * 768),
    StepLoad(32, 32 * 64),
)
"""The most telling first: where time runs out the rest is left to `observe`."""


def measure_steps(
    runner: Runner, pool: BlockPool, max_batch: int, prefill_chunk: int, most_s: float
) -> list[tuple[StepLoad, float]]:
    """(load, seconds) of steps on zero tokens, over blocks that are given back. Each load is run twice where there is
    time, and the shorter counts: what else the machine does makes steps longer, and never shorter."""
    measured: dict[StepLoad, float] = {}
    began = time.perf_counter()
    first = min(16, prefill_chunk)
    _run(runner, pool, StepLoad(1, 16, first, pairs(0, first)))
    for load in _LOADS * 2:
        if load.batch > max_batch or load.prompt > prefill_chunk or time.perf_counter() - began > most_s:
            continue
        seconds = _run(runner, pool, load)
        if seconds is not None:
            measured[load] = min(seconds, measured.get(load, seconds))
    return list(measured.items())


def _run(runner: Runner, pool: BlockPool, load: StepLoad) -> float | None:
    """Seconds of one step of `load`; None where the pool has no room for it."""
    lengths = [int(load.context / load.batch)] * int(load.batch) if load.batch else []
    start = round(load.pairs / load.prompt - load.prompt / 2) if load.prompt else 0
    if load.prompt:
        lengths.append(start + int(load.prompt))
    blocks = pool.take(sum(pool.blocks_for(length) for length in lengths))
    if blocks is None:
        return None
    step, at = Step(), 0
    for index, length in enumerate(lengths):
        seq = Sequence(-1 - index, [0] * length, SamplingParams(max_tokens=1))
        seq.blocks = blocks[at : (at := at + pool.blocks_for(length))]
        if index < load.batch:
            seq.computed = length - 1
            step.decode.append(seq)
        else:
            seq.computed = start
            step.prefill.append(Chunk(seq, start, length - start))
    try:
        begun = time.perf_counter()
        logits, _ = runner.run(step)
        logits.argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - begun
    finally:
        pool.give_back(blocks)
