"""vLLM's engine under `load.py`'s load; run by the interpreter of vLLM's own environment.

python vllm_engine.py MODEL_FOLDER PARAMETERS_JSON
"""

from __future__ import annotations

from load import Parameters, drive, measure
from vllm import EngineArgs, LLMEngine, SamplingParams  # type: ignore[import-not-found]


class VLLM:
    """One process: the engine core runs here too, so that a step is a step."""

    def __init__(self, model: str, parameters: Parameters) -> None:
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=parameters.max_model_len,
                max_num_seqs=parameters.max_batch,
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        self.next_id = 0

    def add(self, tokens: list[int], max_tokens: int) -> None:
        self.next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.next_id), {"prompt_token_ids": tokens}, params)

    def step(self) -> int:
        """Tokens produced."""
        return len(self.engine.step())

    def busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())


if __name__ == "__main__":
    drive(lambda model, parameters: measure(VLLM(model, parameters), parameters))
