"""A client that speaks Anthropic's messages, and a target that speaks OpenAI's chat completions.

Carried: system, text, images, tools and their results, thinking in answers, stop reasons, usage with cached tokens.
Left out: `cache_control` (such targets cache by themselves) and the thinking of earlier turns, which no other model may
be shown. Refused, so that another target may be tried: documents, and tools that Anthropic runs itself.
(https://docs.anthropic.com/en/api/messages, https://platform.openai.com/docs/api-reference/chat)
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from backends.base import Piece
from backends.dialects.translation import Body, Translator, cannot, dumped, json_events, listed, malformed, mapped
from backends.hosted.sse import Splitter

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_OWN = frozenset(
    {*_SAME, "system", "messages", "tools", "tool_choice", "stop_sequences", "metadata", "thinking", "service_tier"}
)
_EFFORTS = ((2048, "low"), (8192, "medium"), (1 << 62, "high"))
"""Tokens of thinking up to which an effort is meant."""
_STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


# --- there ------------------------------------------------------------------------------------------------


def request(body: Body) -> dict[str, Any]:
    asked = {name: body[name] for name in _SAME if name in body}
    # What neither API knows is for the provider behind: vLLM and others take parameters of their own.
    asked |= {name: value for name, value in body.items() if name not in _OWN}
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for index, message in enumerate(listed(body.get("messages"), "messages")):
        messages += _message(mapped(message, f"messages[{index}]"), f"messages[{index}]")
    asked["messages"] = messages
    if body.get("tools"):
        tools = enumerate(listed(body["tools"], "tools"))
        asked["tools"] = [_tool(mapped(tool, f"tools[{index}]"), f"tools[{index}]") for index, tool in tools]
    if body.get("tool_choice"):
        asked |= _tool_choice(mapped(body["tool_choice"], "tool_choice"))
    if body.get("stop_sequences"):
        asked["stop"] = body["stop_sequences"]
    user = body["metadata"].get("user_id") if isinstance(body.get("metadata"), dict) else None
    if user:
        asked["user"] = user
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens") or 0
        asked["reasoning_effort"] = next(effort for most, effort in _EFFORTS if budget < most)
    if body.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    return asked


def _message(message: Body, at: str) -> Iterator[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise malformed(f"{at}.role", "use user or assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = [mapped(block, f"{at}.content") for block in listed(content, f"{at}.content")]
    yield from _assistant(blocks, at) if role == "assistant" else _user(blocks, at)


def _user(blocks: list[Body], at: str) -> Iterator[dict[str, Any]]:
    """The results of tools are messages of their own there, and come before what the user says beside them."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            said = _text(block.get("content") or "", f"{at}.content")
            if block.get("is_error"):
                said = f"Error: {said}"
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
        elif kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": _image(block, at)}})
        else:
            raise cannot(f"{at}.content", f"it has a block of type {kind!r}")
    if len(parts) == 1 and parts[0]["type"] == "text":
        yield {"role": "user", "content": parts[0]["text"]}
    elif parts:
        yield {"role": "user", "content": parts}


def _assistant(blocks: list[Body], at: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            raise cannot(f"{at}.content", f"it has a block of type {kind!r}")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        message["tool_calls"] = calls
    yield message


def _text(value: Any, param: str) -> str:
    """Of a string or text blocks."""
    if isinstance(value, str):
        return value
    texts = []
    for block in listed(value, param):
        if mapped(block, param).get("type") != "text":
            raise cannot(param, f"it has a block of type {block.get('type')!r} where only text can be sent")
        texts.append(str(block.get("text", "")))
    return "\n\n".join(texts)


def _image(block: Body, at: str) -> str:
    source = mapped(block.get("source"), f"{at}.content.source")
    if source.get("type") == "url":
        return str(source.get("url"))
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    raise cannot(f"{at}.content.source", f"its type is {source.get('type')!r}")


def _tool(tool: Body, at: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise cannot(at, f"{tool.get('type')!r} is a tool that Anthropic runs")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Body) -> dict[str, Any]:
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    known: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if kind not in known:
        raise malformed("tool_choice.type", f"use one of {', '.join(known)}")
    asked: dict[str, Any] = {"tool_choice": known[kind]}
    if choice.get("disable_parallel_tool_use"):
        asked["parallel_tool_calls"] = False
    return asked


# --- and back ---------------------------------------------------------------------------------------------


def _usage(usage: Any) -> dict[str, Any]:
    usage = usage if isinstance(usage, dict) else {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (usage.get("prompt_tokens") or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens") or 0,
    }


def _thinking_of(message: Body) -> str:
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


class Answering:
    """One answer. A stream is a sequence of content blocks, of which one is open at a time."""

    def __init__(self, body: Body) -> None:
        self._model = body.get("model")
        self._splitter = Splitter()
        self._begun = False
        self._open: str | None = None
        """What the open block is: `text`, `thinking` or a tool call's index."""
        self._blocks = 0
        self._stop_reason: str | None = None
        self._usage: Any = None

    # --- whole

    def whole(self, piece: Piece) -> bytes:
        answer = json.loads(piece.data)
        choice = (answer.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        content: list[dict[str, Any]] = []
        if thinking := _thinking_of(message):
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if text := message.get("content") or message.get("refusal"):
            content.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            content.append(
                {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": _input(function)}
            )
        return dumped(
            {
                **self._head(answer),
                "content": content,
                "stop_reason": _STOPPED.get(choice.get("finish_reason"), "end_turn"),
                "usage": _usage(answer.get("usage")),
            }
        )

    def _head(self, answer: Body) -> dict[str, Any]:
        return {
            "id": f"msg_{answer.get('id') or secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": answer.get("model") or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    # --- streamed

    def events(self, piece: Piece) -> bytes:
        said: list[dict[str, Any]] = []
        for chunk in json_events(self._splitter, piece.data):
            if not self._begun:
                self._begun = True
                said.append({"type": "message_start", "message": {**self._head(chunk), "usage": _usage(None)}})
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk.get("choices") or ():
                said += self._delta(choice.get("delta") or {})
                if choice.get("finish_reason"):
                    self._stop_reason = _STOPPED.get(choice["finish_reason"], "end_turn")
        if piece.done:
            said += self._end()
        return b"".join([b"event: %b\ndata: %b\n\n" % (one["type"].encode(), dumped(one)) for one in said])

    def _delta(self, delta: Body) -> Iterator[dict[str, Any]]:
        if thinking := _thinking_of(delta):
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._more({"type": "thinking_delta", "thinking": thinking})
        if text := delta.get("content") or delta.get("refusal"):
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            begin = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            yield from self._block(f"call {call.get('index', 0)}", begin)
            if arguments := function.get("arguments"):
                yield self._more({"type": "input_json_delta", "partial_json": arguments})

    def _block(self, what: str, begin: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == what:
            return
        yield from self._close()
        self._open = what
        yield {"type": "content_block_start", "index": self._blocks, "content_block": begin}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._blocks}
            self._blocks += 1

    def _more(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        delta = {"stop_reason": self._stop_reason or "end_turn", "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(self._usage)}
        yield {"type": "message_stop"}


def _input(function: Body) -> Any:
    """A call's arguments; a model may have written what is no JSON, which must not be lost."""
    try:
        return json.loads(function.get("arguments") or "{}")
    except ValueError:
        return {"raw_arguments": function.get("arguments")}


TRANSLATOR = Translator(request, Answering)
