"""The load that every engine is measured under, in its own process. Standard library only."""

from __future__ import annotations

import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Parameters:
    vocabulary: int = 40000
    prefill: list[int] = field(default_factory=lambda: [136, 634, 1533])
    streams: list[int] = field(default_factory=lambda: [1, 8, 32])
    context: int = 270
    """Prompt of each stream: while it is timed it has about 300 tokens."""
    steps: int = 64
    repeats: int = 3
    max_model_len: int = 4096
    max_batch: int = 64
    quantization: str = "none"


class EngineUnderLoad(Protocol):
    def add(self, tokens: list[int], max_tokens: int) -> None:
        """Queue a greedy request that no token ends early."""

    def step(self) -> int:
        """One step of the engine; how many tokens it gave."""

    def busy(self) -> bool: ...


def _drain(engine: EngineUnderLoad) -> None:
    while engine.busy():
        engine.step()


def measure(engine: EngineUnderLoad, parameters: Parameters) -> dict[str, Any]:
    """Prefill tokens/s by prompt length, and the step time in ms by streams."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, parameters.vocabulary) for _ in range(length)]

    engine.add(prompt(64), 4)
    _drain(engine)
    prefill: dict[str, float] = {}
    for length in parameters.prefill:
        times = []
        for _ in range(parameters.repeats):
            engine.add(prompt(length), 1)
            begun = time.perf_counter()
            _drain(engine)
            times.append(time.perf_counter() - begun)
        prefill[str(length)] = round(length / min(times), 1)
    decode: dict[str, float] = {}
    for streams in parameters.streams:
        for _ in range(streams):
            engine.add(prompt(parameters.context), parameters.steps + streams + 16)
        while engine.step() < streams:  # until everybody decodes
            pass
        times = []
        for _ in range(parameters.steps):
            begun = time.perf_counter()
            produced = engine.step()
            if produced == streams:
                times.append((time.perf_counter() - begun) * 1000)
        decode[str(streams)] = round(statistics.median(times), 3)
        _drain(engine)
    return {"prefill": prefill, "decode": decode, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def drive(measured: Callable[[str, Parameters], dict[str, Any]]) -> None:
    """A driver's main: `python driver MODEL PARAMETERS_JSON` prints its result for `benchmarks.engine` to find."""
    print("RESULT " + json.dumps(measured(sys.argv[1], Parameters(**json.loads(sys.argv[2])))), flush=True)
