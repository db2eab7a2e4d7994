"""`transformers` generate, a whole batch at a time: tokens per second at each number of streams.

python -m benchmarks.engines.transformers_engine MODEL_FOLDER PARAMETERS_JSON
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import transformers

from benchmarks.engines.load import Parameters, drive


def measure(folder: str, parameters: Parameters) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rng = random.Random(0)
    rates: dict[str, float] = {}
    for streams in parameters.streams:
        prompts = torch.tensor(
            [[rng.randrange(10, parameters.vocabulary) for _ in range(parameters.context)] for _ in range(streams)]
        )

        def generate(new: int, prompts: torch.Tensor = prompts) -> float:
            begun = time.perf_counter()
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
            return time.perf_counter() - begun

        short, long = generate(2), generate(2 + parameters.steps // 2)
        rates[str(streams)] = round(streams * (parameters.steps // 2) / (long - short), 1)
    return {"tokens_per_s": rates}


if __name__ == "__main__":
    drive(measure)
