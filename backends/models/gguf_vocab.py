"""A GGUF file's byte-level BPE vocabulary as a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.models.errors import ModelError
from backends.models.gguf_file import GGUF

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4
"""Token types (llama.cpp's `llama_token_type`) that are matched whole before any splitting."""

# How text is cut before merging, by `tokenizer.ggml.pre`; the patterns are those of the models' tokenizer.json.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUPPORTED = ("gpt-2", "smollm", "llama-bpe")


def build_tokenizer(file: GGUF) -> tokenizers.Tokenizer:
    """Raises ModelError for a vocabulary that is missing or of a kind not built here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    known = file.metadata
    kind, cut = known.get("tokenizer.ggml.model"), known.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or cut not in SUPPORTED:
        raise ModelError(
            f"{file.path}: the tokenizer {kind!r} with pre-tokenizer {cut!r} is not read from GGUF "
            f"(supported: gpt2 with {', '.join(SUPPORTED)})",
            hint="use the model's Hugging Face folder, which has a tokenizer.json",
        )
    tokens: list[str] = known.get("tokenizer.ggml.tokens") or []
    merges: list[str] = known.get("tokenizer.ggml.merges") or []
    types: list[int] = known.get("tokenizer.ggml.token_type") or []
    if not tokens or not merges:
        raise ModelError(f"{file.path}: the vocabulary is missing")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut == "llama-bpe"))
    split: pre_tokenizers.PreTokenizer
    if cut == "smollm":
        split = pre_tokenizers.Digits(individual_digits=True)
    elif cut == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut != "llama-bpe")
    tokenizer.pre_tokenizer = byte_level if cut == "gpt-2" else pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for index, token_type in enumerate(types):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(tokens[index], normalized=False)])
    return tokenizer
