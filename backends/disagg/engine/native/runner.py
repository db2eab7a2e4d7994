"""Runs a step on the CPU in one call of the compiled forward pass (`engine.c`)."""

from __future__ import annotations

import ctypes
from array import array

import torch

from backends.disagg.engine.batch import lay_out
from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.engine.memory import give_back_freed_memory
from backends.disagg.engine.models.decoder import LINEARS, Decoder
from backends.disagg.engine.models.rope import rope_table
from backends.disagg.engine.native import structs
from backends.disagg.engine.quantized import Int4
from backends.disagg.engine.scheduler import Step
from backends.disagg.engine.sequence import Sequence

_EVEN = 16


def takes(decoder: Decoder) -> bool:
    """Whether there are kernels for its weights, and their vectors divide its sizes, which they do in every model
    we know of."""
    config = decoder.config
    if config.head_dim % _EVEN or config.hidden_size % 2 or config.intermediate_size % 2:
        return False
    return not any(isinstance(getattr(layer, name), Int4) for layer in decoder.layers for name in LINEARS)


def cache_struct(cache: KVCache) -> structs.Cache:
    geometry = cache.geometry
    block_stride, layer_stride, v_offset = cache.data.stride()[:3]
    return structs.Cache(
        data=cache.data.data_ptr(),
        block_stride=block_stride,
        layer_stride=layer_stride,
        v_offset=v_offset,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
    )


_SPAN_FIELDS = 5
"""Of a `struct span`."""


class NativeRunner:
    """Takes `decoder`'s weights over: they are packed layer by layer and then dropped, so they exist once."""

    exact = True

    def __init__(self, decoder: Decoder, cache: KVCache, library: ctypes.CDLL, max_len: int) -> None:
        config, variant = decoder.config, decoder.variant
        weights = structs.Weights(library, cache.geometry.torch_dtype)
        embedding = weights.linear(decoder.embedding)
        head = embedding if decoder.head is decoder.embedding else weights.linear(decoder.head)
        self._vocabulary = decoder.head.shape[0]
        decoder.embedding = decoder.head = torch.empty(0)
        half = config.head_dim // 2

        def table(theta: float, scaling: dict[str, object] | None) -> tuple[int | None, ...]:
            return tuple(
                weights.pointer(part[:, :half]) for part in rope_table(config.head_dim, max_len, theta, scaling)
            )

        cos, sin = table(config.rope_theta, config.rope_scaling)
        local = (cos, sin) if config.local_rope_theta is None else table(config.local_rope_theta, None)
        self._layers = (structs.Layer * config.num_layers)()
        for index in range(config.num_layers):
            layer = decoder.layers.pop(0)
            assert not isinstance(layer.gate_up, Int4)
            gate, up = layer.gate_up.chunk(2)
            self._layers[index] = structs.Layer(
                qkv=weights.linear(layer.qkv, layer.qkv_bias),
                output=weights.linear(layer.output, layer.output_bias),
                gate=weights.linear(gate),
                up=weights.linear(up),
                down=weights.linear(layer.down),
                attention_norm=weights.pointer(layer.attention_norm),
                mlp_norm=weights.pointer(layer.mlp_norm),
                post_attention_norm=weights.pointer(layer.post_attention_norm),
                post_mlp_norm=weights.pointer(layer.post_mlp_norm),
                q_norm=weights.pointer(layer.q_norm),
                k_norm=weights.pointer(layer.k_norm),
                windowed=config.windowed(index),
            )
            del layer, gate, up
            give_back_freed_memory()
        self._model = structs.Model(
            layer=ctypes.addressof(self._layers),
            embedding=embedding,
            head=head,
            final_norm=weights.pointer(decoder.final_norm),
            cos=cos,
            sin=sin,
            local_cos=local[0],
            local_sin=local[1],
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            gelu=variant.activation != "silu",
            window=config.window or 0,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            embedding_scale=config.hidden_size**0.5 if variant.embedding_scaled else 1.0,
        )
        self._cache = cache_struct(cache)
        self._weights = weights
        self._forward = getattr(library, f"forward_{weights.suffix}")
        self._block_size = cache.geometry.block_size

    def run(self, step: Step) -> tuple[torch.Tensor, list[Sequence]]:
        rows = lay_out(step, self._block_size)
        tables, spans = array("i"), array("i")
        row = iter(rows.first)
        for chunk in step.prefill:
            first, end = next(row), chunk.start + chunk.length
            replay = min(end, max(chunk.start, chunk.seq.prompt_len))
            if replay > chunk.start:
                spans.extend((first, chunk.start, replay - chunk.start, len(tables), 0))
            # What is replayed was decoded elsewhere, token by token: the same sums in the same order, or an answer
            # that goes on here could go on otherwise.
            for at in range(replay, end):
                spans.extend((first + at - chunk.start, at, 1, len(tables), 1))
            tables.extend(chunk.seq.blocks)
        for seq in step.decode:
            spans.extend((next(row), seq.computed, 1, len(tables), 1))
            tables.extend(seq.blocks)
        parts = (rows.tokens, rows.positions, rows.blocks, tables, rows.sample_rows, spans)
        laid_out = structs.Step(
            *(part.buffer_info()[0] for part in parts),
            rows=len(rows.tokens),
            spans=len(spans) // _SPAN_FIELDS,
            samples=len(rows.sampled),
        )
        logits = torch.empty(len(rows.sampled), self._vocabulary)
        failed = self._forward(
            ctypes.byref(self._model),
            ctypes.byref(self._cache),
            ctypes.byref(laid_out),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the scratch of a step of {len(rows.tokens)} tokens")
        return logits, rows.sampled
