"""Weight-only int8 and int4: weights are rounded, activations stay as they are.

int8: each output of a linear layer keeps its own scale. Per-channel symmetric rounding to nearest, as in Dettmers et
al. 2022 (LLM.int8) without its outlier columns: as only weights are rounded, outlying activations lose nothing.
int4: 32 inputs of an output share a scale and a zero, in the layout of torch's kernel for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST = 127
INT4_GROUP = 32


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


@dataclass(frozen=True, slots=True)
class Int4:
    """A weight [outs, in] as torch's kernel reads it."""

    packed: torch.Tensor
    """uint8 [outs, in / 2]"""
    scales_and_zeros: torch.Tensor
    """[in / 32, outs, 2], in the activations' dtype: a code q from 0 to 15 stands for (q - 8) * scale + zero"""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))


Weight = torch.Tensor | Quantized | Int4


def quantize(weight: Weight) -> Quantized:
    """The int8 weight nearest to `weight` [outs, in]; one that is int8 already is returned as it is."""
    if isinstance(weight, Quantized):
        return weight
    assert isinstance(weight, torch.Tensor)
    values = weight.float()
    scales = values.abs().amax(dim=1) / _MOST
    # A row of zeros has no scale to divide by.
    codes = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-_MOST, _MOST)
    return Quantized(codes.to(torch.int8), scales)


def quantize_int4(weight: Weight) -> Int4 | Quantized:
    """The int4 weight nearest to `weight` [outs, in]; int8 where the kernel does not take its shape."""
    assert isinstance(weight, torch.Tensor)
    outs, width = weight.shape
    if outs % 16 or width % INT4_GROUP:
        return quantize(weight)
    groups = weight.float().view(outs, -1, INT4_GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    # Rounded as the kernel will have them, before the codes are chosen.
    scales = ((most - least) / 15).clamp(min=torch.finfo(torch.float32).tiny).to(weight.dtype)
    zeros = (least + 8 * scales.float()).to(weight.dtype)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round().clamp(0, 15)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.view(outs, width).to(torch.int32), 1)
    return Int4(packed, torch.stack((scales.T, zeros.T), dim=-1).contiguous())
