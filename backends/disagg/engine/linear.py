"""Linear layers in torch whose rows do not depend on each other.

A token's value must not depend on the batch it was computed in: greedy answers would change with the load, and
with where prefill ran.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS_PER_THREAD = 8
"""Matrix products of fewer rows take other kernels on CPU, which round differently (MKL: below 4 a thread)."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in] times weight [out, in] transposed."""
    rows, least = x.shape[0], MIN_ROWS_PER_THREAD * torch.get_num_threads()
    if rows >= least or x.device.type != "cpu":
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, least - rows)), weight)[:rows]
