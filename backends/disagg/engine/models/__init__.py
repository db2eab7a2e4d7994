"""The architectures the engine computes, by the name in a model's config."""

from __future__ import annotations

from backends.disagg.engine.models.llama import Llama

ARCHITECTURES: dict[str, type[Llama]] = {"LlamaForCausalLM": Llama}
