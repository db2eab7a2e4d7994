"""In what the supported architectures differ. The rest is one decoder, `models/decoder.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Variant:
    """One architecture, by its deviations from Llama."""

    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation."""
    sandwich_norms: bool = False
    """Further norms on what attention and MLP add to the residual stream."""
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    embedding_scaled: bool = False
    """Embeddings times the square root of the hidden size."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
