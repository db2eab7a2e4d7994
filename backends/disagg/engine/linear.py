"""Linear layers behind one seam: many rows of a prompt's chunk, and few rows of sequences that decode.

A token's value must not depend on the batch it was computed in: greedy answers would change with the load, and
with where prefill ran. So each kind of row always takes the same kernel, and that one treats rows alike.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
import torch.nn.functional as F

from backends.disagg.engine import native

MIN_ROWS_PER_THREAD = 8
"""Matrix products of fewer rows take other kernels on CPU, which round differently (MKL: below 4 a thread)."""
_LANES = 8


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, singles: int) -> torch.Tensor:
        """x [rows, in] times weight [out, in] transposed; rows from `singles` on are single tokens."""


def torch_linear(x: torch.Tensor, weight: torch.Tensor, singles: int) -> torch.Tensor:
    """Anywhere torch runs."""
    rows, least = x.shape[0], MIN_ROWS_PER_THREAD * torch.get_num_threads()
    if rows >= least or x.device.type != "cpu":
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, least - rows)), weight)[:rows]


class NativeLinear:
    """Single tokens by the compiled kernel (`native/skinny_linear.c`), chunks by torch."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._kernel = library.skinny_linear_f32 if dtype == torch.float32 else library.skinny_linear_bf16

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, singles: int) -> torch.Tensor:
        if weight.shape[1] % _LANES:
            return torch_linear(x, weight, singles)
        rows = x.shape[0]
        out = x.new_empty(rows, weight.shape[0])
        if singles:
            out[:singles] = torch_linear(x[:singles], weight, singles)
        if singles < rows:
            self._few(x[singles:].contiguous(), weight, out[singles:])
        return out

    def _few(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        rows, width = x.shape
        failed = self._kernel(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, weight.shape[0], torch.get_num_threads()
        )
        if failed:
            raise MemoryError("no memory for a linear layer's scratch rows")


def choose_linear(dtype: torch.dtype, device: torch.device) -> Linear:
    """The fastest implementation that runs here."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        library = native.load()
        if library is not None:
            return NativeLinear(library, dtype)
    return torch_linear
