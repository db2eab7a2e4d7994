"""A GGUF file's vocabulary as a tokenizer: byte-level BPE, or SentencePiece's."""

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
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3_PATTERN, "qwen2": _QWEN2_PATTERN}
SUPPORTED = ("gpt-2", "smollm", *_PATTERNS)
_BLANK = "\u2581"


def build_tokenizer(file: GGUF) -> tokenizers.Tokenizer:
    """Raises ModelError for a vocabulary that is missing or of a kind not built here."""
    from tokenizers import AddedToken

    known = file.metadata
    kind, cut = known.get("tokenizer.ggml.model"), known.get("tokenizer.ggml.pre", "gpt-2")
    tokens: list[str] = known.get("tokenizer.ggml.tokens") or []
    types: list[int] = known.get("tokenizer.ggml.token_type") or []
    if kind == "gpt2" and cut in SUPPORTED:
        tokenizer = _byte_level(file, tokens, cut)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens)
    else:
        raise ModelError(
            f"{file.path}: the tokenizer {kind!r} with pre-tokenizer {cut!r} is not read from GGUF "
            f"(supported: llama; gpt2 with {', '.join(SUPPORTED)})",
            hint="use the model's Hugging Face folder, which has a tokenizer.json",
        )
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    return tokenizer


def _byte_level(file: GGUF, tokens: list[str], cut: str) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2 began it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges: list[str] = file.metadata.get("tokenizer.ggml.merges") or []
    if not tokens or not merges:
        raise ModelError(f"{file.path}: the vocabulary is missing")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut == "llama-bpe"))
    split: pre_tokenizers.PreTokenizer | None = None
    if cut == "smollm":
        split = pre_tokenizers.Digits(individual_digits=True)
    elif cut in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[cut]), behavior="isolated")
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut not in _PATTERNS)
    tokenizer.pre_tokenizer = byte_level if split is None else pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GGUF, tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE (Llama 2, Gemma): pieces merge in the order of their scores, unknown bytes are pieces."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = file.metadata.get("tokenizer.ggml.scores") or []
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    if not tokens or len(scores) != len(tokens):
        raise ModelError(f"{file.path}: the vocabulary is missing")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    blank = normalizers.Replace(" ", _BLANK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blank]) if prefixed else blank
    steps: list[decoders.Decoder] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, the piece with the best score first."""
    found = []
    for piece, index in vocabulary.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
