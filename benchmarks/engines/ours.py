"""Our engine under `load.py`'s load: `python -m benchmarks.engines.ours MODEL PARAMETERS_JSON`."""

from __future__ import annotations

from backends.disagg.engine.engine import Engine, EngineConfig
from backends.disagg.engine.sequence import SamplingParams, Sequence
from backends.models import load_config, resolve
from backends.models.weights import load_weights
from benchmarks.engines.load import Parameters, drive, measure


class Ours:
    def __init__(self, model: str, parameters: Parameters) -> None:
        files = resolve(model, pull_missing=True)
        config = load_config(files)
        most = max(parameters.streams) * (parameters.context + parameters.steps + max(parameters.streams) + 32)
        self.engine = Engine(
            config,
            load_weights(files, config),
            EngineConfig(
                dtype="bfloat16",
                device="cpu",
                block_size=16,
                kv_tokens=max(most, parameters.max_model_len),
                max_model_len=parameters.max_model_len,
                max_batch=parameters.max_batch,
                prefill_chunk=512,
            ),
        )
        self.next_id = 0

    def add(self, tokens: list[int], max_tokens: int) -> None:
        self.next_id += 1
        self.engine.scheduler.add(Sequence(self.next_id, tokens, SamplingParams(max_tokens=max_tokens)))

    def step(self) -> int:
        return len(self.engine.step().tokens)

    def busy(self) -> bool:
        return bool(self.engine.scheduler.sequences)


if __name__ == "__main__":
    drive(lambda model, parameters: measure(Ours(model, parameters), parameters))
