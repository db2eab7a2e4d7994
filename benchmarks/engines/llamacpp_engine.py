"""llama.cpp under `load.py`'s load, one stream at a time and only where `llama-cpp-python` is installed.

`python llamacpp_engine.py GGUF PARAMETERS_JSON`, in an environment of its own; imports nothing of the project but
`load.py` beside it.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from load import Parameters, drive


def measured(model: str, parameters: Parameters) -> dict[str, Any]:
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=parameters.max_model_len, n_threads=1, n_threads_batch=1, verbose=False)
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, parameters.vocabulary) for _ in range(length)]

    llama.eval(prompt(64))
    prefill = {}
    for length in parameters.prefill:
        times = []
        for _ in range(parameters.repeats):
            llama.reset()
            begun = time.perf_counter()
            llama.eval(prompt(length))
            times.append(time.perf_counter() - begun)
        prefill[str(length)] = round(length / min(times), 1)
    llama.reset()
    llama.eval(prompt(parameters.context))
    times = []
    for _ in range(parameters.steps):
        begun = time.perf_counter()
        llama.eval([llama.sample(temp=0.0)])
        times.append((time.perf_counter() - begun) * 1000)
    return {"prefill": prefill, "decode": {"1": round(statistics.median(times), 3)}}


if __name__ == "__main__":
    drive(measured)
