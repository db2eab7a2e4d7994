"""Our engine under `load.py`'s load: `python -m benchmarks.engines.ours MODEL PARAMETERS_JSON`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from backends.disagg.engine.engine import Engine, EngineConfig, Quantization
from backends.disagg.engine.sequence import SamplingParams, Sequence
from backends.models import load_config, resolve
from backends.models.weights import load_weights
from benchmarks.engines.load import Parameters, drive, measure


def make_engine(
    model: str, parameters: Parameters, kv_tokens: int, max_batch: int | None = None, max_model_len: int | None = None
) -> tuple[Engine, int]:
    """(an engine that has measured its steps, how many weights the model has)."""
    files = resolve(model, pull_missing=True)
    config = load_config(files)
    count = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count
        for name, tensor in load_weights(files, config):
            count += tensor.numel()
            yield name, tensor

    engine = Engine(
        config,
        counted(),
        EngineConfig(
            dtype="bfloat16",
            device="cpu",
            block_size=16,
            kv_tokens=kv_tokens,
            max_model_len=max_model_len or parameters.max_model_len,
            max_batch=max_batch or parameters.max_batch,
            prefill_chunk=512,
            quantization=cast(Quantization, parameters.quantization),
        ),
    )
    engine.measure()
    return engine, count


class Ours:
    def __init__(self, model: str, parameters: Parameters) -> None:
        most = max(parameters.streams) * (parameters.context + parameters.steps + max(parameters.streams) + 32)
        self.engine, _ = make_engine(model, parameters, max(most, parameters.max_model_len))
        self.next_id = 0

    def add(self, tokens: list[int], max_tokens: int) -> None:
        self.next_id += 1
        self.engine.scheduler.add(Sequence(self.next_id, tokens, SamplingParams(max_tokens=max_tokens)))

    def step(self) -> int:
        return len(self.engine.step().tokens)

    def busy(self) -> bool:
        return bool(self.engine.scheduler.sequences)


def measured(model: str, parameters: Parameters) -> dict[str, Any]:
    return measure(Ours(model, parameters), parameters)


if __name__ == "__main__":
    drive(measured)
