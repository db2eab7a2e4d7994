"""Attention over the paged KV cache in torch: `prefill` for a prompt's chunk, `decode` for single tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backends.disagg.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One prompt chunk inside a step: rows `row .. row + length`, tokens `start .. start + length`."""

    row: int
    start: int
    length: int
    blocks: torch.Tensor
    """int64 [blocks for start + length tokens]; empty where start is 0."""
    mask: torch.Tensor | None
    """Additive [length, start + length], or None where start is 0 (plain causal)."""
    window_mask: torch.Tensor | None
    """The same for layers with a sliding window; None where that is plain causal too."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The single-token rows of a step: rows `row .. row + len(lengths)`."""

    row: int
    tables: torch.Tensor
    """int32 [rows, widest table]; what lies past a row's length is ignored but must be a valid block."""
    lengths: torch.Tensor
    """int32 [rows]: tokens to attend to, the row's own included (its KV is already written)."""


class TorchAttention:
    """`scale` is the softmax's, by default head_dim^-1/2; `window` what windowed layers see, in tokens."""

    def __init__(self, cache: KVCache, scale: float | None = None, window: int | None = None) -> None:
        self.cache = cache
        self.scale = cache.geometry.head_dim**-0.5 if scale is None else scale
        self.window = window

    def _gather(self, layer: int, which: int, blocks: torch.Tensor) -> torch.Tensor:
        """K (0) or V (1) of `blocks` [..., n] as [..., kv_heads, n * block_size, head_dim]."""
        pages = self.cache.data[:, layer, which][blocks]
        return pages.transpose(-4, -3).flatten(-3, -2)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, span: ChunkSpan, windowed: bool = False
    ) -> torch.Tensor:
        """q [length, heads, head_dim], k and v [length, kv_heads, head_dim] -> [length, heads, head_dim].

        `windowed` layers see the sliding window only.
        """
        mask = span.window_mask if windowed else span.mask
        if span.start:
            total = span.start + span.length
            keys = self._gather(layer, 0, span.blocks)[:, :total]
            values = self._gather(layer, 1, span.blocks)[:, :total]
        else:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        group = q.shape[1] // keys.shape[0]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.repeat_interleave(group, 0)[None],
            values.repeat_interleave(group, 0)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
        )
        return out[0].transpose(0, 1)

    def decode(self, q: torch.Tensor, layer: int, rows: DecodeRows, windowed: bool = False) -> torch.Tensor:
        """q [rows, heads, head_dim] -> the same shape."""
        # One matmul per KV head's group of query heads: with one query token this is far faster than
        # scaled_dot_product_attention on CPU, which has no fast path for it.
        tables = rows.tables.long()
        keys, values = self._gather(layer, 0, tables), self._gather(layer, 1, tables)
        count, heads, dim = q.shape
        grouped = q.view(count, keys.shape[1], heads // keys.shape[1], dim)
        scores = (grouped @ keys.transpose(-1, -2)).float() * self.scale
        places = torch.arange(keys.shape[2], device=q.device)
        beyond = places >= rows.lengths[:, None]
        if windowed and self.window is not None:
            beyond |= places < (rows.lengths - self.window)[:, None]
        weights = scores.masked_fill(beyond[:, None, None], float("-inf")).softmax(-1).to(q.dtype)
        attended: torch.Tensor = weights @ values
        return attended.view(count, heads, dim)
