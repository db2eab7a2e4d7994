"""Gemma 3, text (Gemma Team 2025): GeGLU, norms before and after each part, normalized query and key heads, and
five layers with a sliding window and their own rotary base to each one that sees everything."""

from backends.disagg.engine.models.variant import Variant

GEMMA3 = Variant(
    qk_norm=True, sandwich_norms=True, norm_offset=1.0, embedding_scaled=True, activation="gelu_pytorch_tanh"
)
