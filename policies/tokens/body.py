"""Tokens of a request's prompt: its texts, tools and images, and what a chat template puts around them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from policies.tokens.images import image_tokens
from policies.tokens.text import Estimate, text_tokens

_PER_MESSAGE = 4
_REPLY_PRIMER = 3
_SAID = ("content", "reasoning_content", "refusal", "name", "tool_calls", "function_call")


def estimate_prompt_tokens(surface: str, body: Mapping[str, Any]) -> Estimate:
    """At least 1 token; for any JSON, well-formed or not."""
    counting = _Counting()
    with contextlib.suppress(RecursionError):  # nested as nothing sensible is: the provider will say so
        counting.body(surface, body)
    found = text_tokens("\n".join(counting.texts))
    return Estimate(max(1, found.tokens + counting.tokens), found.kind)


class _Counting:
    """Texts are counted together, at the end: most of what a count costs is its beginning."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0
        """Of what is no text."""

    def body(self, surface: str, body: Mapping[str, Any]) -> None:
        if surface == "completions":
            self.prompt(body.get("prompt"))
            return
        if surface == "embeddings":
            self.prompt(body.get("input"))
            return
        self.tokens = _REPLY_PRIMER
        self.any(body.get("system"))
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            self.tokens += _PER_MESSAGE
            if isinstance(message, Mapping):
                for name in _SAID:
                    if name in message:
                        self.any(message[name])
        for extra in ("tools", "functions", "response_format"):
            self.any(body.get(extra))

    def prompt(self, prompt: Any) -> None:
        if not isinstance(prompt, list):
            self.any(prompt)
        elif all(isinstance(token, int) for token in prompt):
            self.tokens += len(prompt)
        else:
            for one in prompt:
                self.prompt(one)

    def any(self, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, list):
            for part in value:
                self._part(part)
        else:
            self._json(value)

    def _part(self, part: Any) -> None:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind == "function":
            self._json(part)
        elif kind == "tool_use":
            self._json(part.get("input"))
        elif "image" in kind:
            self.tokens += image_tokens(part)
        else:
            # The provider counts audio and files, and base64 is no measure of them.
            self.any(part.get("text") or part.get("content"))

    def _json(self, value: Any) -> None:
        self.texts.append(json.dumps(value, ensure_ascii=False, default=str))
