"""Names how a prompt begins, so that those that could share KV have the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

BEGINNING = 1024
"""Characters that count: a system prompt or the head of a document, not the question at its end."""


def prefix_of(surface: str, body: Mapping[str, Any]) -> str:
    """For any JSON body. Two prompts shorter than the beginning are alike only where they are the same."""
    # Tools are told before the messages in every chat template.
    if surface == "completions":
        parts = [body.get("prompt")]
    else:
        parts = [body.get("tools"), body.get("system"), *_listed(body.get("messages"))]
    text = ""
    for part in parts:
        text += part if isinstance(part, str) else json.dumps(_short(part), ensure_ascii=False, default=str)
        if len(text) >= BEGINNING:
            break
    return hashlib.blake2b(text[:BEGINNING].encode(errors="replace"), digest_size=8).hexdigest()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _short(part: Any) -> Any:
    """`part` without what lies beyond the beginning anyhow."""
    if isinstance(part, list):
        return part[:BEGINNING]
    if isinstance(part, Mapping) and isinstance(part.get("content"), str):
        return {**part, "content": part["content"][:BEGINNING]}
    return part
