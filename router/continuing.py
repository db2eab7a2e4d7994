"""The rest of an answer from another target, after what its client has already been shown.

Only a plain text answer can go on, and only where the target takes the beginning of its own answer: completions (the
prompt is longer then), Anthropic's messages (a last message of the assistant), and OpenAI-compatible servers whose
provider says how (`continues:`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backends.base import Piece, Surface, Usage
from backends.hosted.sse import Splitter
from backends.options import AnthropicOptions, OpenAIOptions

_LIMITS = ("max_completion_tokens", "max_tokens")


class Shown:
    """What a client has seen of a stream."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        """Events with text in them: about as many as tokens."""
        self.plain = True
        """Whether there was nothing but one text."""
        self.envelope: dict[str, Any] = {}
        """What every event of the stream has: its id, its model."""
        self._splitter = Splitter()

    def see(self, piece: Piece) -> None:
        for event in self._splitter.feed(piece.data):
            if event.data is None or event.data == b"[DONE]":
                continue
            body = json.loads(event.data)
            if not self.envelope:
                self.envelope = {name: body[name] for name in ("id", "created", "model") if name in body}
            text, plain = _text_of(body)
            self.plain = self.plain and plain
            if text:
                self.text += text
                self.tokens += 1

    def joined(self, surface: Surface) -> Joined:
        return Joined(self, surface)


def _text_of(body: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of an event, and whether that was all there was."""
    kind = body.get("type")
    if kind is not None:  # Anthropic's
        block = body.get("content_block") or {}
        delta = body.get("delta") or {}
        plain = not body.get("index") and block.get("type", "text") == "text"
        plain = plain and delta.get("type", "text_delta") == "text_delta"
        return (
            delta.get("text") or "",
            (plain and delta.get("type", "text_delta") == "text_delta") or kind == "message_delta",
        )
    choices = body.get("choices") or []
    if not choices:
        return "", True
    choice = choices[0]
    if "text" in choice:
        return choice["text"] or "", not choice.get("index") and not choice.get("logprobs")
    delta = choice.get("delta") or {}
    other = {name for name, value in delta.items() if value} - {"role", "content"}
    return delta.get("content") or "", not other and not choice.get("index") and not choice.get("logprobs")


def continued(surface: Surface, body: Mapping[str, Any], options: object, shown: Shown) -> dict[str, Any] | None:
    """The body that asks for what comes after `shown`; None where that target cannot be asked."""
    if not shown.plain or not shown.text or (body.get("n") or 1) != 1:
        return None
    asked = dict(body)
    for name in _LIMITS:
        if isinstance(asked.get(name), int):
            if asked[name] <= shown.tokens:
                return None
            asked[name] -= shown.tokens
    if surface == "completions":
        if not isinstance(body.get("prompt"), str) or not isinstance(options, OpenAIOptions):
            return None
        return {**asked, "prompt": body["prompt"] + shown.text}
    said: dict[str, Any] = {"role": "assistant", "content": shown.text}
    if surface == "messages" and isinstance(options, AnthropicOptions):
        # Anthropic refuses a beginning that ends in white space.
        return {**asked, "messages": [*body["messages"], said]} if not shown.text[-1].isspace() else None
    if surface != "chat.completions" or not isinstance(options, OpenAIOptions) or options.continues is None:
        return None
    if options.continues == "prefix":
        return {**asked, "messages": [*body["messages"], {**said, "prefix": True}]}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    return {**asked, "messages": [*body["messages"], said], **goes_on}


class Joined:
    """Events of the second stream as if they were of the first."""

    def __init__(self, shown: Shown, surface: Surface) -> None:
        self.usage: Usage | None = None
        self._shown = shown
        self._surface = surface
        self._splitter = Splitter()

    def piece(self, piece: Piece) -> Piece:
        data = b"".join(self._event(event.raw, event.data) for event in self._splitter.feed(piece.data))
        if piece.usage is not None:
            tokens = self._shown.tokens
            self.usage = Usage(
                max(0, piece.usage.prompt_tokens - tokens),
                piece.usage.completion_tokens + tokens,
                piece.usage.cached_tokens,
            )
        return replace(piece, data=data, usage=self.usage)

    def _event(self, raw: bytes, data: bytes | None) -> bytes:
        if data is None or data == b"[DONE]":
            return raw
        body = json.loads(data)
        if self._surface == "messages":
            kind = body.get("type")
            if kind in ("message_start", "ping") or (kind == "content_block_start" and not body.get("index")):
                return b""
            if kind != "message_delta":
                return raw
            usage = body.get("usage") or {}
            body["usage"] = {**usage, "output_tokens": usage.get("output_tokens", 0) + self._shown.tokens}
            return b"event: message_delta\ndata: " + _dumped(body) + b"\n\n"
        choice = (body.get("choices") or [{}])[0]
        delta = choice.get("delta")
        begun = isinstance(delta, dict) and delta.pop("role", None) is not None
        if begun and not any(delta.values()) and choice.get("finish_reason") is None:
            return b""
        body.update(self._shown.envelope)
        if isinstance(usage := body.get("usage"), dict):
            tokens = self._shown.tokens
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + tokens
            usage["prompt_tokens"] = max(0, usage.get("prompt_tokens", 0) - tokens)
        return b"data: " + _dumped(body) + b"\n\n"


def _dumped(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
