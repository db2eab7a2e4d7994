"""OpenAI's answer objects, written by the bundled cluster: chunks of a stream, or one whole body."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from backends.base import Surface, Usage
from backends.disagg.choice import Delta
from backends.disagg.tools import ToolCall

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Renderer:
    """Writes one answer. `answer_id` without its prefix; `model` as the client should see it."""

    def __init__(self, surface: Surface, answer_id: str, model: str) -> None:
        self._chat = surface == "chat.completions"
        self._calls: dict[int, int] = {}
        """By choice, how many calls were written."""
        self._offsets: dict[int, int] = {}
        """By choice, how many characters of text were."""
        self._envelope: dict[str, Any] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + answer_id,
            "object": ("chat.completion.chunk" if self._chat else "text_completion"),
            "created": int(time.time()),
            "model": model,
        }

    # --- streams -------------------------------------------------------------------------------------

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return b"data: " + _encode({**self._envelope, "choices": choices, **extra}) + b"\n\n"

    def opening(self, index: int) -> bytes:
        """The role frame that begins a choice of a chat stream."""
        if not self._chat:
            return b""
        return self._event([_choice(index, delta={"role": "assistant", "content": ""})])

    def delta(self, index: int, delta: Delta) -> bytes:
        """What a delta brought, and the finish reason in a frame of its own where it has one; may be nothing."""
        data = b""
        if delta.content or delta.logprobs:
            logprobs = self._logprobs(index, delta.logprobs)
            if self._chat:
                change: dict[str, Any] = {"content": delta.text} if delta.text or not delta.calls else {}
                if delta.calls:
                    first = self._calls.get(index, 0)
                    self._calls[index] = first + len(delta.calls)
                    change["tool_calls"] = [{"index": first + at, **_call(call)} for at, call in enumerate(delta.calls)]
                data += self._event([_choice(index, logprobs, delta=change)])
            else:
                data += self._event([_choice(index, logprobs, text=delta.text)])
        if delta.finish_reason is not None:
            nothing: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            data += self._event([_choice(index, finish_reason=delta.finish_reason, **nothing)])
        return data

    def ending(self, usage: Usage, include_usage: bool) -> bytes:
        """The usage where asked for, and `[DONE]`."""
        return (self._event([], usage=usage_object(usage)) if include_usage else b"") + DONE

    # --- whole bodies --------------------------------------------------------------------------------

    def whole(self, answers: list[Delta], usage: Usage) -> bytes:
        """The unstreamed answer; each delta is all of a choice."""
        choices = []
        for index, answer in enumerate(answers):
            choice = _choice(index, self._logprobs(index, answer.logprobs), finish_reason=answer.finish_reason)
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
                if answer.calls:
                    message["content"] = answer.text or None
                    message["tool_calls"] = [_call(call) for call in answer.calls]
                choice["message"] = message
            else:
                choice["text"] = answer.text
            choices.append(choice)
        kind = "chat.completion" if self._chat else "text_completion"
        return _encode({**self._envelope, "object": kind, "choices": choices, "usage": usage_object(usage)})

    def _logprobs(self, index: int, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not entries:
            return None
        if self._chat:
            return {"content": entries, "refusal": None}
        offsets = []
        for entry in entries:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
            "text_offset": offsets,
        }


def _choice(
    index: int, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None, **content: Any
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
