"""A client that speaks OpenAI's chat completions, and a target that speaks Anthropic's messages.

Carried: system and developer messages, text, images, tools and their results, reasoning in answers, stop reasons, usage
with cached tokens. Refused, so that another target may be tried: what Anthropic's API has nothing for (several choices,
log-probabilities, penalties, biases, seeds, audio, files). Where no limit is given the answer may have
`DEFAULT_MAX_TOKENS`: Anthropic requires one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from backends.base import Piece
from backends.dialects.translation import (
    Body,
    Translator,
    cannot,
    dumped,
    json_events,
    listed,
    malformed,
    mapped,
    parsed_arguments,
)
from backends.hosted.sse import Splitter

DEFAULT_MAX_TOKENS = 4096
_SAME = ("model", "temperature", "top_p", "top_k", "stream")
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 4096, "high": 16384}
_NOTHING_FOR = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "seed": None,
    "audio": None,
    "modalities": ["text"],
    "prediction": None,
    "web_search_options": None,
    "functions": [],
    "function_call": None,
}
"""Parameters that cannot be carried, with the value that asks for nothing."""
_FINISHED = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "model_context_window_exceeded": "length",
    "pause_turn": "stop",
}


# --- there ------------------------------------------------------------------------------------------------


def request(body: Body) -> dict[str, Any]:
    for name, nothing in _NOTHING_FOR.items():
        if body.get(name) not in (None, nothing):
            raise cannot(name, "Anthropic's API has nothing like it")
    form = body.get("response_format")
    if form is not None and mapped(form, "response_format").get("type") != "text":
        raise cannot("response_format", "Anthropic's API has nothing like it")
    asked = {name: body[name] for name in _SAME if body.get(name) is not None}
    asked["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(listed(body.get("messages"), "messages")):
        at = f"messages[{index}]"
        role = mapped(message, at).get("role")
        if role in ("system", "developer"):
            system.append("".join(part.get("text", "") for part in _parts(message.get("content"), at)))
            continue
        blocks = list(_blocks(message, str(role), at))
        speaker = "assistant" if role == "assistant" else "user"
        if turns and turns[-1]["role"] == speaker:  # results of parallel calls belong into one turn
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": speaker, "content": blocks})
    asked["messages"] = turns
    if system:
        asked["system"] = "\n\n".join(system)
    if body.get("tools"):
        tools = enumerate(listed(body["tools"], "tools"))
        asked["tools"] = [_tool(mapped(tool, f"tools[{index}]"), f"tools[{index}]") for index, tool in tools]
        asked["tool_choice"] = _tool_choice(body)
    if body.get("stop"):
        asked["stop_sequences"] = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
    if body.get("user"):
        asked["metadata"] = {"user_id": body["user"]}
    if body.get("reasoning_effort") in _BUDGETS:
        budget = _BUDGETS[body["reasoning_effort"]]
        asked["thinking"] = {"type": "enabled", "budget_tokens": budget}
        asked["max_tokens"] += budget  # which counts the thinking too
    return asked


def _blocks(message: Body, role: str, at: str) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if role == "tool":
        said = "".join(part.get("text", "") for part in _parts(content, at))
        yield {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": said}
        return
    if role not in ("user", "assistant"):
        raise malformed(f"{at}.role", "use system, developer, user, assistant or tool")
    for part in _parts(content, at):
        if part.get("type") == "image_url":
            yield {"type": "image", "source": _image(mapped(part.get("image_url"), f"{at}.content").get("url"), at)}
        elif part.get("type") in ("text", "refusal"):
            text = part.get("text") or part.get("refusal")
            if text:  # an empty block is refused there
                yield {"type": "text", "text": text}
        else:
            raise cannot(f"{at}.content", f"it has a part of type {part.get('type')!r}")
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = mapped(mapped(call, f"{at}.tool_calls").get("function"), f"{at}.tool_calls[{index}].function")
        arguments = parsed_arguments(function.get("arguments"), f"{at}.tool_calls[{index}].function.arguments")
        yield {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments}


def _parts(content: Any, at: str) -> list[Body]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [mapped(part, f"{at}.content") for part in listed(content, f"{at}.content")]


def _image(url: Any, at: str) -> dict[str, Any]:
    if not isinstance(url, str):
        raise malformed(f"{at}.content.image_url.url", "use an address, or data:…;base64,…")
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url[5:].partition(",")
    return {"type": "base64", "media_type": head.partition(";")[0], "data": data}


def _tool(tool: Body, at: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise cannot(at, f"its type is {tool.get('type')!r}")
    function = mapped(tool.get("function"), f"{at}.function")
    made = {"name": function.get("name"), "input_schema": function.get("parameters") or {"type": "object"}}
    return {**made, "description": function["description"]} if function.get("description") else made


def _tool_choice(body: Body) -> dict[str, Any]:
    asked = body.get("tool_choice", "auto")
    if isinstance(asked, dict) and asked.get("type") == "function":
        choice = {"type": "tool", "name": mapped(asked.get("function"), "tool_choice.function").get("name")}
    elif asked in ("auto", "required", "none"):
        choice = {"type": {"required": "any"}.get(asked, asked)}
    else:
        raise cannot("tool_choice", "use auto, required, none or a function's name")
    if body.get("parallel_tool_calls") is False and choice["type"] != "none":
        choice["disable_parallel_tool_use"] = True
    return choice


# --- and back ---------------------------------------------------------------------------------------------


def _usage(usage: Any) -> dict[str, Any]:
    usage = usage if isinstance(usage, dict) else {}
    cached = usage.get("cache_read_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + cached + (usage.get("cache_creation_input_tokens") or 0)
    answer = usage.get("output_tokens") or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Answering:
    """One answer."""

    def __init__(self, body: Body) -> None:
        self._model = body.get("model")
        options = body.get("stream_options")
        self._include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._splitter = Splitter()
        self._id = ""
        self._created = int(time.time())
        self._calls = -1
        """The index of the latest tool call."""
        self._usage: dict[str, Any] = {}

    def whole(self, piece: Piece) -> bytes:
        answer = json.loads(piece.data)
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        texts, thoughts, calls = [], [], []
        for block in answer.get("content") or ():
            if block.get("type") == "text":
                texts.append(block.get("text", ""))
            elif block.get("type") == "thinking":
                thoughts.append(block.get("thinking", ""))
            elif block.get("type") == "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
        if texts:
            message["content"] = "".join(texts)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        reason = _FINISHED.get(answer.get("stop_reason"), "stop")
        return dumped(
            {
                "id": answer.get("id"),
                "object": "chat.completion",
                "created": self._created,
                "model": answer.get("model") or self._model,
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
                "usage": _usage(answer.get("usage")),
            }
        )

    def events(self, piece: Piece) -> bytes:
        said: list[bytes] = []
        for event in json_events(self._splitter, piece.data):
            said += [b"data: %b\n\n" % dumped(chunk) for chunk in self._chunks(event)]
        if piece.done:
            if self._include_usage:
                said.append(b"data: %b\n\n" % dumped(self._chunk([], usage=_usage(self._usage))))
            said.append(b"data: [DONE]\n\n")
        return b"".join(said)

    def _chunks(self, event: Body) -> Iterator[dict[str, Any]]:
        kind = event.get("type")
        if kind == "message_start":
            message = event.get("message") or {}
            self._id = message.get("id") or f"chatcmpl-{secrets.token_hex(12)}"
            self._model = message.get("model") or self._model
            self._usage.update(message.get("usage") or {})
            yield self._delta({"role": "assistant", "content": ""})
        elif kind == "content_block_start":
            block = event.get("content_block") or {}
            if block.get("type") == "tool_use":
                self._calls += 1
                function = {"name": block.get("name"), "arguments": ""}
                yield self._call({"id": block.get("id"), "type": "function", "function": function})
            elif block.get("text"):
                yield self._delta({"content": block["text"]})
        elif kind == "content_block_delta":
            delta = event.get("delta") or {}
            if delta.get("type") == "text_delta":
                yield self._delta({"content": delta.get("text", "")})
            elif delta.get("type") == "thinking_delta":
                yield self._delta({"reasoning_content": delta.get("thinking", "")})
            elif delta.get("type") == "input_json_delta":
                yield self._call({"function": {"arguments": delta.get("partial_json", "")}})
        elif kind == "message_delta":
            self._usage.update({name: value for name, value in (event.get("usage") or {}).items() if value is not None})
            if reason := (event.get("delta") or {}).get("stop_reason"):
                yield self._delta({}, _FINISHED.get(reason, "stop"))

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        return self._delta({"tool_calls": [{"index": self._calls, **call}]})

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}


TRANSLATOR = Translator(request, Answering)
