"""Exact token counts for hosted models whose vocabulary is on this machine.

`tokenizer:` of a provider names OpenAI's encoding (tiktoken, with a table that tiktoken has cached or litellm ships;
nothing is downloaded) or a `tokenizer.json`. What a chat template puts around messages is counted as OpenAI's cookbook
does: 3 tokens a message and 3 for the reply.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ENCODINGS = ("o200k_base", "cl100k_base")
_PER_MESSAGE = 3
_REPLY_PRIMER = 3

Count = Callable[[str], int]


class TokenizerMissing(Exception):
    """The message says what is missing, and how it comes here."""


def litellm_tables() -> Path | None:
    """Where litellm keeps vocabularies; it is not imported, which would take seconds."""
    found = importlib.util.find_spec("litellm")
    if found is None or found.origin is None:
        return None
    tables = Path(found.origin).parent / "litellm_core_utils" / "tokenizers"
    return tables if tables.is_dir() else None


def text_counter(tokenizer: str) -> Count:
    """Counts with an encoding of `ENCODINGS` or the `tokenizer.json` at a path. Raises TokenizerMissing."""
    return _tiktoken(tokenizer) if tokenizer in ENCODINGS else _from_file(Path(tokenizer))


def _tiktoken(encoding: str) -> Count:
    try:
        import tiktoken
    except ImportError:
        raise TokenizerMissing(f"{encoding} needs tiktoken: pip install tiktoken litellm") from None
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    tables = Path(cache) if cache else litellm_tables()
    if tables is None or not (tables / _cached_as(encoding)).is_file():
        raise TokenizerMissing(f"the table of {encoding} is not on this machine: pip install litellm, which ships it")
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(tables)
    try:
        table = tiktoken.get_encoding(encoding)
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before
    return lambda text: len(table.encode_ordinary(text))


def _cached_as(encoding: str) -> str:
    """The name under which tiktoken keeps a table; where there is no such file, it would download one."""
    address = f"https://openaipublic.blob.core.windows.net/encodings/{encoding}.tiktoken"
    return hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()


def _from_file(path: Path) -> Count:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TokenizerMissing("a tokenizer.json needs tokenizers: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        known = " or ".join(ENCODINGS)
        raise TokenizerMissing(f"tokenizer {str(path)!r} is no file; name a tokenizer.json, or {known}")
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerMissing(f"{str(file)!r} is no tokenizer: {error}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def count_body(count: Count, surface: str, body: Mapping[str, Any]) -> int | None:
    """None for what only the provider can count: tools, images, anything but text."""
    if surface == "completions":
        prompt = body.get("prompt")
        return max(1, count(prompt)) if isinstance(prompt, str) else None
    if body.get("tools") or body.get("functions") or body.get("response_format"):
        return None
    texts: list[str] = []
    for message in body["messages"]:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            if not isinstance(text, str):
                return None
            texts.append(text)
        texts.append(str(message["role"]))
    return _REPLY_PRIMER + _PER_MESSAGE * len(body["messages"]) + sum(count(text) for text in texts)
