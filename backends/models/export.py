"""Writes a model as a Hugging Face folder, for tools that do not read what it came in."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from backends.models.config import ModelConfig, load_config
from backends.models.errors import ModelError
from backends.models.files import ModelFiles
from backends.models.weights import load_weights

DTYPES = ("float32", "bfloat16", "float16")


def export_hf(files: ModelFiles, folder: Path, dtype: str = "bfloat16") -> None:
    """Write config, tokenizer, chat template and safetensors to `folder`, which must not exist yet.

    Raises ModelError; a failed export leaves nothing.
    """
    import torch
    from safetensors.torch import save_file

    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    if folder.exists():
        raise ModelError(f"{folder} exists already", hint="name a folder that does not")
    config = load_config(files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        wanted: torch.dtype = getattr(torch, dtype)
        weights = {name: tensor.to(wanted).contiguous() for name, tensor in load_weights(files, config)}
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        _write_json(scratch / "config.json", _hf_config(config, dtype))
        _write_tokenizer(files, config, scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    ends = list(config.eos_token_ids)
    return {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "torch_dtype": dtype,
    }


def _write_tokenizer(files: ModelFiles, config: ModelConfig, folder: Path) -> None:
    if files.kind == "hf":
        for pattern in ("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json"):
            for path in files.path.glob(pattern):
                shutil.copy(path, folder)
        return
    from backends.models.gguf_file import open_gguf
    from backends.models.gguf_vocab import build_tokenizer

    file = open_gguf(files.path)
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": file.metadata.get("tokenizer.chat_template"),
    }
    for kind in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        settings[f"{kind}_token"] = None if token is None else tokens[token]
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
