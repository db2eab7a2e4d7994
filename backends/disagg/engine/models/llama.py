"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from backends.disagg.engine.attention import Attention
from backends.disagg.engine.batch import Batch
from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.engine.linear import Linear
from backends.disagg.engine.models.rope import apply_rope, rope_table

if TYPE_CHECKING:
    from backends.models import ModelConfig


class _Layer:
    __slots__ = ("attention_norm", "down", "gate_up", "mlp_norm", "output", "qkv")

    def __init__(self, take: _Taker, index: int) -> None:
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        self.attention_norm = take(at + "input_layernorm.weight")
        self.qkv = torch.cat([take(f"{attention}{part}_proj.weight") for part in "qkv"])
        self.output = take(attention + "o_proj.weight")
        self.mlp_norm = take(at + "post_attention_layernorm.weight")
        self.gate_up = torch.cat([take(f"{mlp}{part}_proj.weight") for part in ("gate", "up")])
        self.down = take(mlp + "down_proj.weight")


class _Taker:
    """Hands out each weight once; says which are missing or left over."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device):
        self._weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise ValueError(f"the model's files have no weight {name!r}; they may be of another architecture")
        return self._weights.pop(name)


class Llama:
    """Weights of one model, on one device in one dtype, and its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        if config.attention_bias or config.mlp_bias:
            raise ValueError("Llama with attention_bias or mlp_bias is not supported")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; Llama uses 'silu'")
        self.config = config
        take = _Taker(weights, dtype, device)
        self.embedding = take("model.embed_tokens.weight")
        self.layers = [_Layer(take, index) for index in range(config.num_layers)]
        self.final_norm = take("model.norm.weight")
        self.head = self.embedding if config.tie_word_embeddings else take("lm_head.weight")
        cos, sin = rope_table(config.head_dim, max_len, config.rope_theta, config.rope_scaling)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def forward(self, batch: Batch, cache: KVCache, attention: Attention, linear: Linear) -> torch.Tensor:
        """Compute all rows of `batch`, writing their KV; logits float32 [len(batch.sample_rows), vocab]."""
        config = self.config
        singles = batch.singles
        x = F.embedding(batch.tokens, self.embedding)
        cos = self._cos[batch.positions].unsqueeze(1)
        sin = self._sin[batch.positions].unsqueeze(1)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        for index, layer in enumerate(self.layers):
            qkv = linear(self._norm(x, layer.attention_norm), layer.qkv, singles).view(-1, heads + 2 * kv_heads, dim)
            rotated = apply_rope(qkv[:, : heads + kv_heads], cos, sin)
            q, k, v = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
            cache.data[:, index, 0][batch.slot_blocks, :, batch.slot_offsets] = k
            cache.data[:, index, 1][batch.slot_blocks, :, batch.slot_offsets] = v
            attended = [
                attention.prefill(
                    q[span.row : span.row + span.length],
                    k[span.row : span.row + span.length],
                    v[span.row : span.row + span.length],
                    index,
                    span,
                )
                for span in batch.prefill
            ]
            if batch.decode is not None:
                attended.append(attention.decode(q[batch.decode.row :], index, batch.decode))
            merged = attended[0] if len(attended) == 1 else torch.cat(attended)
            x = x + linear(merged.reshape(-1, heads * dim), layer.output, singles)
            gate, up = linear(self._norm(x, layer.mlp_norm), layer.gate_up, singles).chunk(2, dim=-1)
            x = x + linear(F.silu(gate) * up, layer.down, singles)
        chosen = self._norm(x[batch.sample_rows], self.final_norm)
        return linear(chosen, self.head, 0).float()
