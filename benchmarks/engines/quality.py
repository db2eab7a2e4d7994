"""What int8 and int4 weights cost in quality: perplexity and greedy agreement on a fixed text, position by position.

`python -m benchmarks.engines.quality MODEL PARAMETERS_JSON`
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.resources import files as resources
from typing import Any

import torch

from backends.disagg.engine.scheduler import Chunk, Step
from backends.disagg.engine.sequence import SamplingParams, Sequence
from backends.models import load_tokenizer, resolve
from benchmarks.engines.load import Parameters, drive
from benchmarks.engines.ours import make_engine

_ROWS = 128
"""Positions computed at once."""


@torch.inference_mode()
def logits_of(model: str, parameters: Parameters, tokens: list[int]) -> torch.Tensor:
    """float32 [positions, vocabulary]: what the engine gives after each of `tokens`."""
    engine, _ = make_engine(model, parameters, len(tokens) + 1)
    blocks = engine.scheduler.pool.take(engine.scheduler.pool.blocks_for(len(tokens)))
    assert blocks is not None
    rows = []
    for begin in range(0, len(tokens), _ROWS):
        step = Step()
        for at in range(begin, min(begin + _ROWS, len(tokens))):
            # Each position is the last of a prompt of its own, all in the same blocks: so each gives its logits.
            prefix = Sequence(at, tokens[: at + 1], SamplingParams(max_tokens=1), blocks=blocks)
            step.prefill.append(Chunk(prefix, at, 1))
        rows.append(engine.runner.run(step)[0])
    return torch.cat(rows)


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    chosen = torch.tensor(tokens[1:])
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], chosen).item())


def quality(model: str, parameters: Parameters) -> dict[str, Any]:
    text = resources("router.cli").joinpath("data/two-kitchens.txt").read_text()
    tokens = load_tokenizer(resolve(model, pull_missing=True)).encode(text)[: parameters.max_model_len]
    full = logits_of(model, parameters, tokens)
    before = perplexity(full, tokens)
    result: dict[str, Any] = {"tokens": len(tokens), "bfloat16": {"perplexity": round(before, 4)}}
    for kind in ("int8", "int4"):
        rounded = logits_of(model, replace(parameters, quantization=kind), tokens)
        after = perplexity(rounded, tokens)
        result[kind] = {
            "perplexity": round(after, 4),
            "perplexity_increase": round(after / before - 1, 5),
            "greedy_agreement": round((full.argmax(-1) == rounded.argmax(-1)).double().mean().item(), 4),
        }
    return result


if __name__ == "__main__":
    drive(quality)
