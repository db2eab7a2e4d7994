"""The architectures the engine computes, by the name in a model's config."""

from __future__ import annotations

from backends.disagg.engine.models.gemma3 import GEMMA3
from backends.disagg.engine.models.llama import LLAMA
from backends.disagg.engine.models.mistral import MISTRAL
from backends.disagg.engine.models.qwen2 import QWEN2
from backends.disagg.engine.models.qwen3 import QWEN3
from backends.disagg.engine.models.variant import Variant

ARCHITECTURES: dict[str, Variant] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma3ForCausalLM": GEMMA3,
}
