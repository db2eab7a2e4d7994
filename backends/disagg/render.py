"""OpenAI's answer objects, written by the bundled cluster: chunks of a stream, or one whole body."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from backends.base import Piece, Surface, Usage

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


class Renderer:
    """Writes one answer. `answer_id` without its prefix; `model` as the client should see it."""

    def __init__(self, surface: Surface, answer_id: str, model: str) -> None:
        self._chat = surface == "chat.completions"
        self._envelope: dict[str, Any] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + answer_id,
            "object": ("chat.completion.chunk" if self._chat else "text_completion"),
            "created": int(time.time()),
            "model": model,
        }

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return b"data: " + _encode({**self._envelope, "choices": choices, **extra}) + b"\n\n"

    def _choice(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        if self._chat:
            return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        text = delta.get("content", "")
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def opening(self) -> Piece | None:
        """The role frame that begins a chat stream."""
        if not self._chat:
            return None
        return Piece(self._event([self._choice({"role": "assistant", "content": ""}, None)]))

    def text(self, text: str) -> Piece:
        return Piece(self._event([self._choice({"content": text}, None)]), content=True)

    def ending(self, text: str, finish_reason: str, usage: Usage, include_usage: bool) -> Piece:
        """The last text, the finish reason, the usage where asked for, and `[DONE]`."""
        data = self._event([self._choice({"content": text}, None)]) if text else b""
        data += self._event([self._choice({}, finish_reason)])
        if include_usage:
            data += self._event([], usage=usage_object(usage))
        return Piece(data + _DONE, content=bool(text), usage=usage, done=True)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Piece:
        """The unstreamed answer."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        body = {**self._envelope, "object": kind, "choices": [choice], "usage": usage_object(usage)}
        return Piece(_encode(body), content=bool(text), usage=usage, done=True)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
