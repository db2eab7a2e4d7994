"""How many tokens a prompt has, roughly, where no tokenizer of the target is at hand.

About four characters of Latin text make a token in the vocabularies in use (OpenAI's own rule of thumb);
Chinese, Japanese and Korean take about one token a character. A message costs a few tokens around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_CHARS_PER_TOKEN = 4
_PER_MESSAGE = 4
_REPLY_PRIMER = 3
_DENSE = 0x2E80
"""From here on (CJK radicals) characters are dense."""


def estimate_prompt_tokens(surface: str, body: Mapping[str, Any]) -> int:
    """At least 1; for any JSON, well-formed or not."""
    if surface == "completions":
        return max(1, _prompt(body.get("prompt")))
    tokens = _REPLY_PRIMER
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        tokens += _PER_MESSAGE
        if isinstance(message, Mapping):
            tokens += sum(_any(value) for value in message.values())
    for extra in ("tools", "functions", "response_format"):
        tokens += _any(body.get(extra))
    return tokens


def _prompt(prompt: Any) -> int:
    if isinstance(prompt, list):
        if all(isinstance(token, int) for token in prompt):
            return len(prompt)
        return sum(_prompt(one) for one in prompt)
    return _any(prompt)


def _any(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        # Text parts; an image is counted by the provider, and its address or base64 is no measure of it.
        return sum(_text(str(part.get("text") or "")) if _is_part(part) else _json(part) for part in value)
    return _json(value)


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] != "function"


def _json(value: Any) -> int:
    return _text(json.dumps(value, ensure_ascii=False, default=str))


def _text(text: str) -> int:
    if text.isascii():
        return -(-len(text) // _CHARS_PER_TOKEN)
    dense = sum(ord(character) >= _DENSE for character in text)
    return dense - (dense - len(text)) // _CHARS_PER_TOKEN
