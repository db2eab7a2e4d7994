"""Text in and out of the model: chat template, tokens, incremental detokenizing, stop strings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.models import ModelError, ModelFiles, Tokenizer, load_config, load_tokenizer, resolve
from backends.models.chat_template import ChatTemplate
from backends.models.detokenize import Detokenizer
from backends.models.export import export_hf
from backends.models.stops import StopChecker
from backends.models.weights import load_weights

_TOKENIZERS: dict[Path, Tokenizer] = {}


def tokenizer_of(files: ModelFiles) -> Tokenizer:
    return _TOKENIZERS.setdefault(files.path, load_tokenizer(files))


def test_a_conversation_is_rendered_as_the_model_was_trained(smollm2: ModelFiles) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
    ]
    assert tokenizer_of(smollm2).render_chat(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_are_single_ids_and_not_shown(smollm2: ModelFiles) -> None:
    tokenizer = tokenizer_of(smollm2)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert "im_start" not in tokenizer.decode(ids)


def test_digits_are_tokens_of_their_own(smollm2: ModelFiles) -> None:
    assert len(tokenizer_of(smollm2).encode("2026")) == 4


@settings(deadline=None, max_examples=40)
@given(text=st.text(alphabet="aZ09 .,!?<|>\n\té£ßø中文🦙🏽"))  # this vocabulary lacks some rare bytes
def test_any_text_survives_encoding_and_piecewise_decoding(smollm2: ModelFiles, text: str) -> None:
    tokenizer = tokenizer_of(smollm2)
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    pieces = Detokenizer(tokenizer)
    assert "".join([pieces.push([token]) for token in ids]) + pieces.finish() == text


@settings(deadline=None, max_examples=40)
@given(ids=st.lists(st.integers(17, 49151), max_size=60))
def test_pieces_of_any_tokens_never_show_half_a_character_early(smollm2: ModelFiles, ids: list[int]) -> None:
    tokenizer = tokenizer_of(smollm2)
    pieces = Detokenizer(tokenizer)
    shown = [pieces.push([token]) for token in ids]
    whole = tokenizer.decode(ids)
    assert "".join(shown) + pieces.finish() == whole


def test_an_emoji_of_several_tokens_comes_whole(smollm2: ModelFiles) -> None:
    tokenizer = tokenizer_of(smollm2)
    pieces = Detokenizer(tokenizer)
    shown = [pieces.push([token]) for token in tokenizer.encode("a 🦙 b")]
    assert "".join(shown) == "a 🦙 b"
    assert not any("\ufffd" in piece for piece in shown)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab\nc", max_size=4), max_size=12),
)
def test_text_is_cut_before_the_first_stop_however_it_is_split(stops: list[str], pieces: list[str]) -> None:
    checker = StopChecker(stops)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        if stopped:
            break
    if not stopped:
        shown += checker.flush()
    whole = "".join(pieces)
    # The first moment at which the text so far has a stop string in it decides, as for a reader of the stream.
    if not any(stop in whole for stop in stops):
        assert not stopped and shown == whole
    else:
        assert stopped
        assert whole.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopChecker(()).push("abc") == ("abc", False)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for x in range(10) %}{{ raise_exception('no') }}{% endfor %}",
    ],
)
def test_a_hostile_or_refusing_template_is_an_error(source: str) -> None:
    with pytest.raises(ModelError, match="refuses these messages"):
        ChatTemplate(source, "", "").render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse_is_an_error() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate("{% if %}", "", "")


def test_an_exported_folder_is_the_same_model(smollm2: ModelFiles, tmp_path: Path) -> None:
    export_hf(smollm2, tmp_path / "hf", dtype="float32")
    folder = resolve(str(tmp_path / "hf"))
    assert folder.kind == "hf"
    assert load_config(folder) == load_config(smollm2)
    messages = [{"role": "user", "content": "Count to 10: 1 2 3 🦙"}]
    assert load_tokenizer(folder).encode_chat(messages) == tokenizer_of(smollm2).encode_chat(messages)
    config = load_config(smollm2)
    theirs = dict(load_weights(folder, config))
    for name, tensor in load_weights(smollm2, config):
        assert torch.equal(tensor, theirs.pop(name)), name
    assert not theirs

    with pytest.raises(ModelError, match="exists already"):
        export_hf(smollm2, tmp_path / "hf")
    shard = tmp_path / "hf" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        list(load_weights(folder, config))
    (tmp_path / "hf" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_config(folder)
