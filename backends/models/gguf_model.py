"""What a GGUF file of a supported family means: its shape, and its weights under their Hugging Face names."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.models.errors import ModelError
from backends.models.gguf_file import TensorInfo, open_gguf

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backends.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """What llama.cpp's converter did to one architecture's weights."""

    architecture: str
    """The HF class that computes the same."""
    interleaved: bool = False
    """The rotary halves of query and key heads are interleaved."""
    norm_added: float = 0.0
    """What was added to the weight of every norm."""
    sandwich_norms: bool = False
    activation: str = "silu"
    windows_every: int = 0
    """All layers but each so-manieth have a sliding window (llama.cpp has this in its code, not in the file)."""
    local_rope_theta: float | None = None


FAMILIES = {
    "llama": Family("LlamaForCausalLM", interleaved=True),  # Mistral too
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        norm_added=1.0,
        sandwich_norms=True,
        activation="gelu_pytorch_tanh",
        windows_every=6,
        local_rope_theta=10_000.0,
    ),
}
"""By `general.architecture`."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose attention scale is not that of its heads; the file does not say so."""


def read_config(path: Path) -> ModelConfig:
    """Raises ModelError for another architecture or metadata that is missing."""
    from backends.models.config import ModelConfig

    file = open_gguf(path)
    known = file.metadata
    name = str(known.get("general.architecture"))
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")

    def need(key: str) -> Any:
        if (found := known.get(f"{name}.{key}")) is None:
            raise ModelError(f"{path}: the metadata has no {name}.{key}")
        return found

    tensors = {tensor.name for tensor in file.tensors}
    if "rope_freqs.weight" in tensors or known.get(f"{name}.rope.scaling.type") not in (None, "none"):
        raise ModelError(
            f"{path}: scaled rotary positions are not read from GGUF",
            hint="use the model's Hugging Face folder instead",
        )
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    ends = {known[key] for kind in ("eos", "eot") if (key := f"tokenizer.ggml.{kind}_token_id") in known}
    layers = int(need("block_count"))
    window = known.get(f"{name}.attention.sliding_window") if family.windows_every else None
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=int(known.get(f"{name}.vocab_size") or len(known.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        intermediate_size=int(need("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(known.get(f"{name}.attention.head_count_kv", heads)),
        head_dim=int(known.get(f"{name}.attention.key_length", hidden // heads)),
        max_position_embeddings=int(need("context_length")),
        rope_theta=float(known.get(f"{name}.rope.freq_base", 10000.0)),
        rope_scaling=None,
        rms_norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in tensors,
        hidden_act=family.activation,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=known.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(sorted(int(end) for end in ends)),
        window=None if window is None else int(window),
        windowed_layers=()
        if window is None
        else tuple((layer + 1) % family.windows_every != 0 for layer in range(layers)),
        attention_scale=(hidden / heads) ** -0.5 if name == "gemma3" and layers == _GEMMA3_27B_LAYERS else None,
        local_rope_theta=family.local_rope_theta,
    )


def read_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """(HF name, float32 array) of every tensor, dequantized one by one."""
    import numpy as np

    file = open_gguf(path)
    family = FAMILIES[str(file.metadata["general.architecture"])]
    for tensor in file.tensors:
        array = _dequantized(path, file.data, tensor)
        if family.interleaved and ".attn_q." in tensor.name:
            array = _unpermute(array, config.num_heads)
        elif family.interleaved and ".attn_k." in tensor.name:
            array = _unpermute(array, config.num_kv_heads)
        elif family.norm_added and tensor.name.endswith("norm.weight"):
            array = array - np.float32(family.norm_added)
        yield _hf_name(tensor.name, family), array
        if hasattr(mmap, "MADV_DONTNEED"):
            file.data.madvise(mmap.MADV_DONTNEED)  # its pages stay in the file cache, but not in this process


def _dequantized(path: Path, data: mmap.mmap, tensor: TensorInfo) -> npt.NDArray[np.float32]:
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.quantization)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    *rows, columns = tensor.shape
    size = int(np.prod(rows, dtype=np.int64)) * (columns // block) * block_bytes
    raw = np.frombuffer(data, dtype=np.uint8, count=size, offset=tensor.offset)
    try:
        if kind is GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape).copy()
        if kind is GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
        array: npt.NDArray[np.float32] = dequantize(raw.reshape(*rows, -1), kind)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(f"{path}: tensor {tensor.name} ({kind.name}) cannot be read: {error}") from None
    return array.reshape(tensor.shape).astype(np.float32, copy=False)


def _hf_name(name: str, family: Family) -> str:
    if (known := _GLOBAL_NAMES.get(name)) is not None:
        return known
    parts = name.split(".")  # blk.<layer>.<part>.<weight or bias>
    names = {**_LAYER_NAMES, **_SANDWICH_NAMES} if family.sandwich_norms else _LAYER_NAMES
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
    raise ModelError(f"GGUF tensor {name!r} is not part of a supported architecture")


def _unpermute(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of each head's rotary halves: [heads · d, in] for the half-split form."""
    rows = array.shape[0]
    interleaved = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return interleaved.swapaxes(1, 2).reshape(array.shape)
