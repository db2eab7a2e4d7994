"""What `engine.c` is given, field by field as its structs stand there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from backends.disagg.engine.quantized import Int4, Quantized, Weight

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Linear(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [*_fields(_POINTER, "weights bias scales"), *_fields(_INT, "inputs outs")]


class Layer(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_fields(Linear, "qkv output gate up down"),
        *_fields(_POINTER, "attention_norm mlp_norm post_attention_norm post_mlp_norm q_norm k_norm"),
        *_fields(_INT, "windowed"),
    ]


class Model(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_fields(_POINTER, "layer"),
        *_fields(Linear, "embedding head"),
        *_fields(_POINTER, "final_norm cos sin local_cos local_sin"),
        *_fields(_INT, "layers hidden heads gelu window"),
        *_fields(_FLOAT, "eps scale embedding_scale"),
    ]


class Cache(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_fields(_POINTER, "data"),
        *_fields(_LONG, "block_stride layer_stride v_offset"),
        *_fields(_INT, "kv_heads head_dim block_size"),
    ]


class Step(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *_fields(_POINTER, "tokens positions blocks tables sampled span"),
        *_fields(_INT, "rows spans samples"),
    ]


class Weights:
    """Tensors in the layout the kernels read, kept alive as long as this is."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.suffix = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
        self._pack = getattr(library, f"pack_{self.suffix}")
        self._pack_codes = getattr(library, f"pack_codes_{self.suffix}")
        self._panel: int = library.panel()
        self._kept: list[torch.Tensor] = []

    def pointer(self, tensor: torch.Tensor | None) -> int | None:
        """`tensor` as float32, for norms, biases and tables; None stays None."""
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """weight [outs, in], packed into panels."""
        assert not isinstance(weight, Int4)
        outs, width = weight.shape
        values, pack = (weight.codes, self._pack_codes) if isinstance(weight, Quantized) else (weight, self._pack)
        packed = torch.empty(-(-outs // self._panel) * self._panel * width, dtype=values.dtype)
        pack(values.contiguous().data_ptr(), packed.data_ptr(), width, outs)
        self._kept.append(packed)
        return Linear(
            weights=packed.data_ptr(),
            bias=self.pointer(bias),
            scales=self.pointer(weight.scales) if isinstance(weight, Quantized) else None,
            inputs=width,
            outs=outs,
        )
