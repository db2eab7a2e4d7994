"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on the query, key and value projections."""

from backends.disagg.engine.models.variant import Variant

QWEN2 = Variant(qkv_bias=True)
