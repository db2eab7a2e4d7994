"""Weight-only int8: each output of a linear layer keeps its own scale; activations stay as they are.

Per-channel symmetric rounding to nearest, as in Dettmers et al. 2022 (LLM.int8) without its outlier columns: as
only weights are rounded, outlying activations lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST = 127


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [outs, in] that is `codes` * `scales[:, None]`."""

    codes: torch.Tensor
    """int8 [outs, in], from -127 to 127"""
    scales: torch.Tensor
    """float32 [outs]"""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def chunk(self, count: int) -> list[Quantized]:
        """`count` weights of equally many outputs, as torch's `chunk` gives."""
        parts = zip(self.codes.chunk(count), self.scales.chunk(count), strict=True)
        return [Quantized(codes, scales) for codes, scales in parts]


Weight = torch.Tensor | Quantized


def quantize(weight: Weight) -> Quantized:
    """The int8 weight nearest to `weight` [outs, in]; one that is int8 already is returned as it is."""
    if isinstance(weight, Quantized):
        return weight
    values = weight.float()
    scales = values.abs().amax(dim=1) / _MOST
    # A row of zeros has no scale to divide by.
    codes = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-_MOST, _MOST)
    return Quantized(codes.to(torch.int8), scales)
