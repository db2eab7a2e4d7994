"""What a request needs of a model beyond giving text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NEEDS = ("tools", "vision", "audio", "files", "json", "json-schema", "logprobs")
_BY_PART = {
    "image_url": "vision",
    "input_image": "vision",
    "image": "vision",
    "input_audio": "audio",
    "file": "files",
    "input_file": "files",
    "document": "files",
}
_BY_FORMAT = {"json_object": "json", "json_schema": "json-schema"}


def needs_of(body: Mapping[str, Any]) -> frozenset[str]:
    """For any JSON body, well-formed or not."""
    return frozenset(_needs(body))


def _needs(body: Mapping[str, Any]) -> Iterator[str]:
    if (body.get("tools") or body.get("functions")) and body.get("tool_choice") != "none":
        yield "tools"
    if body.get("logprobs"):
        yield "logprobs"
    form = body.get("response_format")
    kind = form.get("type") if isinstance(form, Mapping) else None
    if isinstance(kind, str) and kind in _BY_FORMAT:
        yield _BY_FORMAT[kind]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in _BY_PART:
                yield _BY_PART[kind]
