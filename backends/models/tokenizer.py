"""A model's own tokenizer and chat template, from tokenizer.json or a GGUF file's vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from backends.models.chat_template import ChatTemplate
from backends.models.config import load_config, read_json
from backends.models.errors import ModelError
from backends.models.files import ModelFiles

if TYPE_CHECKING:
    import tokenizers

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_REST)}
"""GPT-2's way to write any byte as a printable character."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece's way."""


class Tokenizer:
    """Text to ids and back. Stateless: any number of requests may use it at once."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        template: ChatTemplate | None,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        add_bos: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._bos = bos_token_id if add_bos else None
        self.eos_token_ids = frozenset(eos_token_ids)
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self.vocab_size = vocab_size
        """As the model has it: ids below it are valid input."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the tokens the model expects around any text (such as a first BOS)."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids if self._bos is None else [self._bos, *ids]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins. Raises ModelError."""
        # The template writes special tokens itself; adding them again would double the first.
        ids: list[int] = self._tokenizer.encode(self.render_chat(messages, tools), add_special_tokens=False).ids
        return ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The conversation as text. Raises ModelError where the template refuses it, or there is none."""
        if self._template is None:
            raise ModelError(
                "this model has no chat template", hint="use /v1/completions, or an instruction-tuned model"
            )
        return self._template.render(messages, tools)

    @property
    def tool_style(self) -> Literal["tagged", "bare"] | None:
        """How the chat template has the model write tool calls; None where it cannot tell it of any."""
        if self._template is None or not self._template.takes_tools:
            return None
        return "tagged" if "<tool_call>" in self._template.source else "bare"

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to the text; nothing for an id outside the vocabulary. Special tokens have their names."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in piece)
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def to_json(self) -> str:
        """The tokenizer as a Hugging Face tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids))
        return text


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises ModelError for a tokenizer that is missing, broken or of an unsupported kind."""
    return _from_gguf(files) if files.kind == "gguf" else _from_folder(files)


def _from_folder(files: ModelFiles) -> Tokenizer:
    from tokenizers import Tokenizer as Tokenizers

    path = files.path / "tokenizer.json"
    try:
        tokenizer = Tokenizers.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{path}: not a tokenizer ({error})") from None
    settings_path = files.path / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    config = load_config(files)
    eos = _token_text(settings.get("eos_token"))
    eos_id = tokenizer.token_to_id(eos) if eos else None
    return Tokenizer(
        tokenizer,
        template=_folder_template(files.path, settings),
        bos_token_id=config.bos_token_id,
        eos_token_ids=[*config.eos_token_ids, *([] if eos_id is None else [eos_id])],
        vocab_size=config.vocab_size,
    )


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    # transformers 5 keeps the template in a file of its own, earlier ones in tokenizer_config.json.
    own_file = folder / "chat_template.jinja"
    source = own_file.read_text(encoding="utf-8") if own_file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {template["name"]: template["template"] for template in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token")))


def _token_text(token: Any) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _from_gguf(files: ModelFiles) -> Tokenizer:
    from backends.models.gguf_file import open_gguf
    from backends.models.gguf_vocab import build_tokenizer

    file = open_gguf(files.path)
    known = file.metadata
    config = load_config(files)
    tokens: list[str] = known.get("tokenizer.ggml.tokens", [])

    def text_of(kind: str) -> str:
        token = known.get(f"tokenizer.ggml.{kind}_token_id")
        return tokens[token] if token is not None and token < len(tokens) else ""

    source = known.get("tokenizer.chat_template")
    return Tokenizer(
        build_tokenizer(file),
        template=ChatTemplate(source, text_of("bos"), text_of("eos")) if source else None,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
        add_bos=bool(known.get("tokenizer.ggml.add_bos_token", False)),
    )
