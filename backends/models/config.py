"""What the engine must know of a model's shape, from config.json or from a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.models.errors import ModelError
from backends.models.files import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Names as in Hugging Face's config.json; sizes in elements."""

    architecture: str
    """As `architectures` has it, such as LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Any of them ends an answer."""
    window: int | None = None
    """Tokens that layers with a sliding window see, the own one included; None where no layer has one."""
    windowed_layers: tuple[bool, ...] = ()
    """For each layer whether it has the window; empty where none has."""
    attention_scale: float | None = None
    """The softmax's scale; None for head_dim^-1/2."""
    local_rope_theta: float | None = None
    """The rotary base of layers with a window, where it is another than `rope_theta`."""

    def windowed(self, layer: int) -> bool:
        """Whether `layer` sees the sliding window only."""
        return bool(self.windowed_layers) and self.windowed_layers[layer]


def load_config(files: ModelFiles) -> ModelConfig:
    """Raises ModelError where the configuration is missing something or makes no sense."""
    if files.kind == "gguf":
        from backends.models.gguf_model import read_config

        return read_config(files.path)
    raw = read_json(files.path / "config.json")
    generation = files.path / "generation_config.json"
    try:
        return _from_hf(raw, read_json(generation) if generation.is_file() else {})
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{files.path / 'config.json'}: {what}") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}); is the download complete?") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, this is a {type(value).__name__}")
    return value


def _from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    for unsupported in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(unsupported) is not None:
            raise ValueError(f"{unsupported} is not supported")
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    layers = int(raw["num_hidden_layers"])
    rope, local_theta = _rope(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    window, windowed = _windows(raw, layers)
    scalar = raw.get("query_pre_attn_scalar")
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=None if kind == "default" else dict(rope),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        # transformers leaves out what is its own default, and that is True for Gemma alone.
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", "Gemma" in str(raw["architectures"][0]))),
        hidden_act=str(raw.get("hidden_activation") or raw.get("hidden_act", "silu")),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
        window=window,
        windowed_layers=windowed,
        attention_scale=None if scalar is None else float(scalar) ** -0.5,
        local_rope_theta=local_theta,
    )


def _rope(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None]:
    """(theta and scaling of layers that see everything, theta of those with a window where it is another)."""
    # transformers 5 writes theta and scaling as one `rope_parameters`; by the kind of layer where they differ.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    local = raw.get("rope_local_base_freq")
    if "full_attention" in rope:
        local = (rope.get("sliding_attention") or {}).get("rope_theta", local)
        rope = rope["full_attention"] or {}
    return rope, None if local is None else float(local)


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """(window, for each layer whether it has it), from whichever keys the architecture's config has."""
    window = raw.get("sliding_window")
    if window is None or raw.get("use_sliding_window") is False:
        return None, ()
    if kinds := raw.get("layer_types"):
        windowed = tuple(kind == "sliding_attention" for kind in kinds)
    elif pattern := raw.get("sliding_window_pattern"):
        windowed = tuple((layer + 1) % int(pattern) != 0 for layer in range(layers))
    elif raw.get("use_sliding_window"):
        windowed = tuple(layer >= int(raw.get("max_window_layers", 0)) for layer in range(layers))
    else:
        windowed = (True,) * layers
    return (int(window), windowed) if any(windowed) else (None, ())


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    found: set[int] = set()
    for value in values:
        found.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(found))
