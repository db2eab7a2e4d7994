"""Linear layers in torch whose rows do not depend on each other.

A token's value must not depend on the batch it was computed in: greedy answers would change with the load, and
with where prefill ran.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from backends.disagg.engine.quantized import INT4_GROUP, Int4, Quantized, Weight

MIN_ROWS_PER_THREAD = 8
"""Matrix products of fewer rows take other kernels on CPU, which round differently (MKL: below 4 a thread)."""


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [rows, in] times weight [out, in] transposed."""
    if isinstance(weight, Quantized):
        return linear(x, weight.codes.to(x.dtype)) * weight.scales.to(x.dtype)
    if isinstance(weight, Int4):  # its rows do not depend on each other
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), weight.packed, INT4_GROUP, weight.scales_and_zeros
        )
        return product
    rows, least = x.shape[0], MIN_ROWS_PER_THREAD * torch.get_num_threads()
    if rows >= least or x.device.type != "cpu":
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, least - rows)), weight)[:rows]


def embed(tokens: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The rows of weight [vocabulary, width] that tokens [n] name."""
    if isinstance(weight, Quantized):
        return (weight.codes[tokens] * weight.scales[tokens, None]).to(dtype)
    assert isinstance(weight, torch.Tensor)
    return F.embedding(tokens, weight)
