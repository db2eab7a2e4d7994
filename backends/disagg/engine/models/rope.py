"""Rotary position embedding (Su et al. 2021) in the half-split form of Llama, with the scalings of these families."""

from __future__ import annotations

import math
from typing import Any

import torch


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Stretch low frequencies by `factor`, keep high ones, blend between (Llama 3.1's `rope_type: llama3`)."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, theta: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """(frequencies, factor of cos and sin). YaRN (Peng et al. 2023): dimensions that turn often within the original
    length stay, those that turn less than once are stretched by `factor`, those between are blended."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    half = len(frequencies)

    def dimension(turns: float) -> float:
        """The dimension that turns so many times within the original length."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    stretched = ((torch.arange(half) - first) / max(last - first, 0.001)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return frequencies * (1 - stretched) + frequencies / factor * stretched, float(attention)


def rope_table(
    head_dim: int, length: int, theta: float, scaling: dict[str, Any] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [length, head_dim]. Raises ValueError for a scaling it does not know."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    attention = 1.0
    positions = torch.arange(length, dtype=torch.float32)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling and kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling and kind == "linear":
        frequencies = frequencies / float(scaling["factor"])
    elif scaling and kind == "yarn":
        frequencies, attention = _yarn(frequencies, theta, scaling)
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    angles = torch.outer(positions, frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention, angles.sin() * attention


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [rows, heads, head_dim] by cos, sin [rows, 1, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
