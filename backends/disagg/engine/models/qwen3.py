"""Qwen3 (Yang et al. 2025): Llama with normalized query and key heads."""

from backends.disagg.engine.models.variant import Variant

QWEN3 = Variant(qk_norm=True)
