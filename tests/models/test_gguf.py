"""Our GGUF reader against the reference writer and reader, and against files that are broken."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.models import ModelConfig, ModelError, ModelFiles, fingerprint, load_config, load_tokenizer
from backends.models.gguf_file import open_gguf
from backends.models.gguf_model import read_weights

HIDDEN, HEADS, KV_HEADS, INTER, VOCAB = 64, 4, 2, 96, 40


def write_tiny(path: Path, *, architecture: str = "llama", quantization: str = "F32", **changes: float | str) -> None:
    """A one-layer Llama with random weights, by the reference writer."""
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {
        "block_count": 1,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "context_length": 128,
    }
    for key, number in metadata.items():
        if key not in changes:
            writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model(str(changes.get("tokenizer", "gpt2")))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_eos_token_id(2)
    kind = gguf.GGMLQuantizationType[quantization]
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        array = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1 or quantization == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    tensor("token_embd.weight", VOCAB, HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    tensor("blk.0.attn_norm.weight", HIDDEN)
    tensor("blk.0.ffn_norm.weight", HIDDEN)
    tensor("blk.0.attn_q.weight", HIDDEN, HIDDEN)
    tensor("blk.0.attn_k.weight", HIDDEN // 2, HIDDEN)
    tensor("blk.0.attn_v.weight", HIDDEN // 2, HIDDEN)
    tensor("blk.0.attn_output.weight", HIDDEN, HIDDEN)
    tensor("blk.0.ffn_gate.weight", INTER, HIDDEN)
    tensor("blk.0.ffn_up.weight", INTER, HIDDEN)
    tensor("blk.0.ffn_down.weight", HIDDEN, INTER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny(path)
    return path


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_metadata_and_tensors_equal_the_reference_readers(tmp_path: Path, quantization: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, quantization=quantization)
    reference = gguf.GGUFReader(path)
    ours = open_gguf(path)
    assert ours.metadata == {
        key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")
    }
    config = load_config(ModelFiles("tiny", path, "gguf"))
    weights = dict(read_weights(path, config))
    assert len(weights) == len(reference.tensors)
    for name, theirs in (("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),):
        (tensor,) = [tensor for tensor in reference.tensors if tensor.name == theirs]
        np.testing.assert_array_equal(weights[name], gguf.dequantize(tensor.data, tensor.tensor_type))


def test_the_shape_is_read_from_metadata(tiny: Path) -> None:
    config = load_config(ModelFiles("tiny", tiny, "gguf"))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HIDDEN // HEADS)
    assert config.vocab_size == VOCAB
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="'mamba' is not supported; supported: llama"):
        load_config(ModelFiles("other", tmp_path / "other.gguf", "gguf"))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path / "bare.gguf", **{"attention.head_count": 0})
    with pytest.raises(ModelError, match=r"no llama\.attention\.head_count"):
        load_config(ModelFiles("bare", tmp_path / "bare.gguf", "gguf"))


def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "other.gguf", tokenizer="rwkv")
    with pytest.raises(ModelError, match="'rwkv'"):
        load_tokenizer(ModelFiles("other", tmp_path / "other.gguf", "gguf"))


def k_blocks(kind: str, count: int) -> tuple[bytes, list[float]]:
    """Random super-blocks of 256 weights, and their values by ggml's definition of the format, one by one."""
    rng = np.random.default_rng(7)
    data, values = b"", []
    for _ in range(count):
        scale, least = np.float16(rng.uniform(0.001, 0.1)), np.float16(rng.uniform(0.001, 0.1))
        if kind == "Q4_K":
            packed, low = rng.integers(0, 256, 12, dtype=np.uint8), rng.integers(0, 256, 128, dtype=np.uint8)
            data += scale.tobytes() + least.tobytes() + packed.tobytes() + low.tobytes()
            for sub in range(8):
                if sub < 4:
                    by, minus = packed[sub] & 63, packed[sub + 4] & 63
                else:
                    by = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4
                    minus = (packed[sub + 4] >> 4) | (packed[sub] >> 6) << 4
                for at in range(32):
                    nibble = int(low[sub // 2 * 32 + at]) >> 4 * (sub % 2) & 15
                    values.append(float(scale) * int(by) * nibble - float(least) * int(minus))
        else:
            low, high = rng.integers(0, 256, 128, dtype=np.uint8), rng.integers(0, 256, 64, dtype=np.uint8)
            scales = rng.integers(-128, 128, 16, dtype=np.int8)
            data += low.tobytes() + high.tobytes() + scales.tobytes() + scale.tobytes()
            for index in range(256):
                half, rest = divmod(index, 128)
                quarter, at = divmod(rest, 32)
                nibble = int(low[half * 64 + quarter % 2 * 32 + at]) >> 4 * (quarter // 2) & 15
                top = int(high[half * 32 + at]) >> 2 * quarter & 3
                values.append(float(scale) * int(scales[index // 16]) * ((nibble | top << 4) - 32))
    return data, values


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_are_read_as_ggml_defines_them(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    data, values = k_blocks(kind, 6)
    raw = np.frombuffer(data, dtype=np.uint8).reshape(3, -1)  # [3, 512] weights
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((_, array),) = read_weights(path, load_config_of_a_tiny_model(tmp_path))
    np.testing.assert_allclose(array, np.array(values).reshape(3, 512), rtol=1e-5, atol=1e-6)


def load_config_of_a_tiny_model(folder: Path) -> ModelConfig:
    write_tiny(folder / "tiny.gguf")
    return load_config(ModelFiles("tiny", folder / "tiny.gguf", "gguf"))


def test_a_file_truncated_anywhere_is_refused(tiny: Path) -> None:
    whole = tiny.read_bytes()
    for length in [0, 3, 4, 20, 100, 1000, len(whole) // 2, len(whole) - 1000]:
        tiny.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="not a complete GGUF file"):
            open_gguf(tiny)


def test_the_real_file_truncated_is_refused(smollm2: ModelFiles, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with smollm2.path.open("rb") as file:
        short.write_bytes(file.read(3_000_000))
    with pytest.raises(ModelError, match="in the middle of its weights"):
        load_config(ModelFiles("short", short, "gguf"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(data=st.data())
def test_a_corrupted_header_never_does_worse_than_an_error(tiny: Path, data: st.DataObject) -> None:
    changed = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    broken = tiny.with_name("broken.gguf")
    broken.write_bytes(changed)
    with contextlib.suppress(ModelError):
        open_gguf(broken)


def test_fingerprints_tell_files_apart(tmp_path: Path, tiny: Path) -> None:
    other = tmp_path / "other.gguf"
    write_tiny(other, quantization="F16")
    marks = {fingerprint(ModelFiles("x", path, "gguf")) for path in (tiny, other)}
    assert len(marks) == 2
    assert fingerprint(ModelFiles("another name", tiny, "gguf")) in marks
