"""Logits of every architecture equal those of `transformers` on the same random weights, chunked, paged and batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from backends.disagg.engine import engine as engines
from backends.disagg.engine import native
from backends.disagg.engine.engine import Engine, EngineConfig, Quantization
from backends.disagg.engine.linear import linear
from backends.disagg.engine.models import ARCHITECTURES
from backends.disagg.engine.quantized import Quantized, quantize, quantize_int4
from backends.disagg.engine.sequence import SamplingParams, Sequence
from backends.models import ModelConfig, ModelFiles, load_config
from backends.models.weights import load_weights

BASE: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,  # logits that differ, so that a wrong one shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2 with yarn": ("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1_000_000.0}}),
    "qwen3 with yarn": ("Qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.1, "beta_fast": 8}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with a window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 16, "query_pre_attn_scalar": 24, "num_hidden_layers": 7, "sliding_window_pattern": 3},
    ),
}


def saved(tmp_path: Path, family: str, changes: dict[str, Any]) -> tuple[Any, ModelFiles]:
    """(the reference model, its folder as we read it), in small shards."""
    torch.manual_seed(0)
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**{**BASE, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # they start at 0 or 1, which would hide mistakes
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return model, ModelFiles(family, tmp_path, "hf")


def engine_of(files: ModelFiles, config: ModelConfig, quantization: Quantization = "none") -> Engine:
    return Engine(
        config,
        load_weights(files, config),
        EngineConfig(
            dtype="float32",
            device="cpu",
            block_size=8,
            kv_tokens=1024,
            max_model_len=256,
            max_batch=8,
            prefill_chunk=16,
            quantization=quantization,
        ),
    )


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """`weight` as the engine's rounded one stands for it; int4 by the kernel's own product with the identity."""
    made = quantize_int4(weight.detach()) if kind == "int4" else quantize(weight)
    if isinstance(made, Quantized):
        return made.codes * made.scales[:, None]
    return linear(torch.eye(weight.shape[1]), made).T


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_references(
    tmp_path: Path, case: str, compiled: bool, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounded weights the reference computes with them too, in float."""
    if not compiled:
        monkeypatch.setattr("backends.disagg.engine.native.load", lambda: None)
    model, files = saved(tmp_path, *CASES[case])
    engine = engine_of(files, load_config(files), quantization)
    logits: dict[int, list[torch.Tensor]] = {}
    sample = engines.sample

    def watched(rows: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        for row, seq in zip(rows, sequences, strict=True):
            logits.setdefault(seq.id, []).append(row.clone())
        return sample(rows, sequences)

    monkeypatch.setattr(engines, "sample", watched)
    torch.manual_seed(1)
    params = SamplingParams(max_tokens=12, temperature=0.0, top_p=1.0, seed=0, stop_ids=frozenset())
    sequences = [
        Sequence(index, torch.randint(3, 120, (length,)).tolist(), params)
        for index, length in enumerate((1, 8, 15, 16, 17, 50, 70))
    ]
    prompt_lengths = [len(seq.tokens) for seq in sequences]
    for seq in sequences:
        engine.scheduler.add(seq)
    tokens = {seq.id: list(seq.tokens) for seq in sequences}
    while len(logits) < len(sequences) or any(len(rows) < 12 for rows in logits.values()):
        for out in engine.step().tokens:
            tokens[out.seq.id].append(out.token)
            if out.finish_reason is not None:
                engine.scheduler.finish(out.seq)
    if quantization != "none":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    in_layer = "layers" in name
                    parameter.copy_(rounded(parameter, "int4" if quantization == "int4" and in_layer else "int8"))
    exact = model.double()
    for seq, length in zip(sequences, prompt_lengths, strict=True):
        with torch.no_grad():
            expected = exact(torch.tensor([tokens[seq.id][:-1]])).logits[0, length - 1 :]
        got = torch.stack(logits[seq.id]).double()
        # The reference's own float32 logits are as far from these.
        torch.testing.assert_close(got, expected, atol=4e-4, rtol=2e-4)


@pytest.mark.skipif(native.load() is None, reason="no C compiler here: torch's sums depend on how many rows there are")
@pytest.mark.parametrize("case", CASES)
def test_an_answer_taken_over_after_any_token_has_the_same_logits_bit_for_bit(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another worker said is replayed in one chunk; near a tie the last bit decides how the answer goes on."""
    _, files = saved(tmp_path, *CASES[case])
    engine = engine_of(files, load_config(files))
    logits: dict[tuple[int, int], torch.Tensor] = {}
    sample = engines.sample

    def watched(rows: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        for row, seq in zip(rows, sequences, strict=True):
            logits[seq.id, seq.output_len] = row.clone()
        return sample(rows, sequences)

    monkeypatch.setattr(engines, "sample", watched)
    torch.manual_seed(1)
    prompt, params = torch.randint(3, 120, (37,)).tolist(), SamplingParams(max_tokens=40)
    undisturbed = Sequence(0, list(prompt), params)
    engine.scheduler.add(undisturbed)
    while engine.scheduler.sequences:
        engine.step()
    answer = undisturbed.tokens[37:]
    for given in (1, 2, 11, 39):
        engine.scheduler.add(Sequence(given, list(prompt), params, replay=answer[:given]))
    while engine.scheduler.sequences:
        engine.step()
    for given in (1, 2, 11, 39):
        assert (given, given - 1) not in logits, "what was said is not said again"
        for position in range(given, 40):
            assert torch.equal(logits[given, position], logits[0, position]), (given, position)


def test_an_architecture_that_is_not_known_lists_those_that_are(tmp_path: Path) -> None:
    _, files = saved(tmp_path, "Llama", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"'MambaForCausalLM' is not supported; supported: .*LlamaForCausalLM"):
        engine_of(files, load_config(files))
    assert len(ARCHITECTURES) == 5


def test_weights_of_another_architecture_are_named(tmp_path: Path) -> None:
    _, files = saved(tmp_path, "Llama", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ValueError, match=r"no weight 'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        engine_of(files, load_config(files))


def test_soft_capping_is_refused_and_not_ignored(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "final_logit_softcapping": 30.0}))
    with pytest.raises(Exception, match="final_logit_softcapping is not supported"):
        load_config(ModelFiles("x", tmp_path, "hf"))
