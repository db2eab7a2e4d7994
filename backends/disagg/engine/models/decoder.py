"""The decoder-only transformer that every supported architecture is a variant of: weights and forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from backends.disagg.engine.attention import TorchAttention
from backends.disagg.engine.batch import Batch
from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.engine.linear import embed, linear
from backends.disagg.engine.models.rope import apply_rope, rope_table
from backends.disagg.engine.models.variant import Variant
from backends.disagg.engine.quantized import Weight, quantize, quantize_int4

if TYPE_CHECKING:
    from backends.models import ModelConfig

LINEARS = ("qkv", "output", "gate_up", "down")
"""A layer's weights that may be rounded."""


class _Taker:
    """Hands out each weight once; says which are missing."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device):
        self._weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            raise ValueError(f"the model's files have no weight {name!r}; they may be of another architecture")
        return self._weights.pop(name)


class _Layer:
    __slots__ = (
        "attention_norm",
        "down",
        "gate_up",
        "k_norm",
        "mlp_norm",
        "output",
        "output_bias",
        "post_attention_norm",
        "post_mlp_norm",
        "q_norm",
        "qkv",
        "qkv_bias",
    )

    def __init__(self, take: _Taker, index: int, variant: Variant, config: ModelConfig) -> None:
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."

        def norm(name: str) -> torch.Tensor:
            # The offset is added in float32, as the reference does on every step.
            weight = take(name + ".weight")
            return (weight.float() + variant.norm_offset).to(weight.dtype) if variant.norm_offset else weight

        self.qkv: Weight = torch.cat([take(f"{attention}{part}_proj.weight") for part in "qkv"])
        self.qkv_bias = self.output_bias = None
        if variant.qkv_bias or config.attention_bias:
            self.qkv_bias = torch.cat([take(f"{attention}{part}_proj.bias") for part in "qkv"])
        if config.attention_bias:
            self.output_bias = take(attention + "o_proj.bias")
        self.output: Weight = take(attention + "o_proj.weight")
        self.q_norm = norm(attention + "q_norm") if variant.qk_norm else None
        self.k_norm = norm(attention + "k_norm") if variant.qk_norm else None
        self.attention_norm = norm(at + "input_layernorm")
        self.post_attention_norm = self.post_mlp_norm = None
        if variant.sandwich_norms:
            self.post_attention_norm = norm(at + "post_attention_layernorm")
            self.mlp_norm = norm(at + "pre_feedforward_layernorm")
            self.post_mlp_norm = norm(at + "post_feedforward_layernorm")
        else:
            self.mlp_norm = norm(at + "post_attention_layernorm")
        self.gate_up: Weight = torch.cat([take(f"{mlp}{part}_proj.weight") for part in ("gate", "up")])
        self.down: Weight = take(mlp + "down_proj.weight")


class Decoder:
    """Weights of one model, on one device in one dtype."""

    def __init__(
        self,
        variant: Variant,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        if config.mlp_bias:
            raise ValueError("mlp_bias is not supported")
        if config.hidden_act != variant.activation:
            raise ValueError(
                f"hidden_act {config.hidden_act!r} is not supported; {config.architecture} uses {variant.activation!r}"
            )
        self.variant = variant
        self.config = config
        take = _Taker(weights, dtype, device)
        self.embedding: Weight = take("model.embed_tokens.weight")
        self.layers = [_Layer(take, index, variant, config) for index in range(config.num_layers)]
        final = take("model.norm.weight")
        self.final_norm = (final.float() + variant.norm_offset).to(dtype)
        self.head: Weight = self.embedding if config.tie_word_embeddings else take("lm_head.weight")
        self._scale = torch.tensor(config.hidden_size**0.5, dtype=dtype) if variant.embedding_scaled else None

        def table(theta: float, scaling: dict[str, object] | None) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = rope_table(config.head_dim, max_len, theta, scaling)
            return cos.to(device, dtype), sin.to(device, dtype)

        self._rope = table(config.rope_theta, config.rope_scaling)
        """For layers that see everything."""
        self._local_rope = self._rope if config.local_rope_theta is None else table(config.local_rope_theta, None)
        """For layers with a window."""

    def quantize(self, kind: Literal["int8", "int4"]) -> None:
        """Round the linear layers to `kind` and the embedding to int8, layer by layer."""
        rounded = quantize_int4 if kind == "int4" else quantize
        tied = self.head is self.embedding
        self.embedding = quantize(self.embedding)
        self.head = self.embedding if tied else quantize(self.head)
        for layer in self.layers:
            for name in LINEARS:
                setattr(layer, name, rounded(getattr(layer, name)))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def forward(self, batch: Batch, cache: KVCache, attention: TorchAttention) -> torch.Tensor:
        """Compute all rows of `batch`, writing their KV; logits float32 [len(batch.sample_rows), vocab]."""
        config = self.config
        x = embed(batch.tokens, self.embedding, self.final_norm.dtype)
        if self._scale is not None:
            x = x * self._scale
        rope = [part[batch.positions].unsqueeze(1) for part in self._rope]
        local_rope = rope
        if self._local_rope is not self._rope:
            local_rope = [part[batch.positions].unsqueeze(1) for part in self._local_rope]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        for index, layer in enumerate(self.layers):
            windowed = config.windowed(index)
            cos, sin = local_rope if windowed else rope
            qkv = linear(self._norm(x, layer.attention_norm), layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
            if layer.q_norm is None or layer.k_norm is None:
                unrotated = qkv[:, : heads + kv_heads]
            else:
                queries = self._norm(qkv[:, :heads], layer.q_norm)
                unrotated = torch.cat((queries, self._norm(qkv[:, heads : heads + kv_heads], layer.k_norm)), dim=1)
            rotated = apply_rope(unrotated, cos, sin)
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
                    windowed,
                )
                for span in batch.prefill
            ]
            if batch.decode is not None:
                attended.append(attention.decode(q[batch.decode.row :], index, batch.decode, windowed))
            merged = attended[0] if len(attended) == 1 else torch.cat(attended)
            added = linear(merged.reshape(-1, heads * dim), layer.output)
            if layer.output_bias is not None:
                added = added + layer.output_bias
            x = x + (added if layer.post_attention_norm is None else self._norm(added, layer.post_attention_norm))
            gate, up = linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            gate = F.silu(gate) if self.variant.activation == "silu" else F.gelu(gate, approximate="tanh")
            added = linear(gate * up, layer.down)
            x = x + (added if layer.post_mlp_norm is None else self._norm(added, layer.post_mlp_norm))
        chosen = self._norm(x[batch.sample_rows], self.final_norm)
        return linear(chosen, self.head).float()
