"""OpenAI request bodies as the bundled cluster understands them. Torch-free.

What it cannot do yet is refused by name with 400 `unsupported_parameter`, never ignored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.base import Surface
from backends.disagg.refusals import bad, unsupported
from backends.disagg.tools import Style, Tools, parse_tools

_COMMON = {"model", "stream", "stream_options", "temperature", "top_p", "seed", "stop", "max_tokens", "n"}
_COMMON |= {"presence_penalty", "frequency_penalty", "logit_bias"}
_COMMON |= {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"}  # as vLLM names them
_COMMON |= {"logprobs", "response_format"}
_SURFACES: dict[str, set[str]] = {
    "chat.completions": _COMMON
    | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"},
    "completions": _COMMON | {"prompt"},
}
_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Bookkeeping for the provider: the answer is the same without."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
"""Not supported, but accepted with a value that asks for nothing (null always does)."""
MAX_STOPS = 16
MAX_ANSWERS = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated body. `max_tokens` None means: as many as the context has room for."""

    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    include_usage: bool
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None
    """How many of the likeliest tokens to report beside each; None for no log-probabilities at all."""
    schema: dict[str, Any] | None
    """The JSON schema that the answer must follow."""
    tools: Tools | None

    def highest_token_id(self) -> int:
        """Of those the body names; -1 where it names none."""
        return max([*self.logit_bias, *self.stop_token_ids], default=-1)


def parse_request(surface: Surface, body: Mapping[str, Any]) -> GenerationRequest:
    """Validate all but the prompt. Raises BackendError (400) naming field, value and remedy."""
    for name, value in body.items():
        if name in _SURFACES[surface] or name in _NO_EFFECT or value is None:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise unsupported(name, value, "leave it out, or route this request to a target that supports it")
    tools = parse_tools(body) if surface == "chat.completions" else None
    schema = _schema(body.get("response_format"))
    if schema is not None and tools is not None and tools.forced:
        raise bad("tool_choice", body["tool_choice"], "an answer is a tool call or follows response_format, not both")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _number(body, name, None, low=1, whole=True)
    seed = _number(body, "seed", None, low=-(1 << 63), high=(1 << 64) - 1, whole=True)
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise bad("stream_options", options, 'use an object such as {"include_usage": true}')
    min_tokens = int(_number(body, "min_tokens", 0, low=0, whole=True) or 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad("min_tokens", min_tokens, f"use at most {name} ({max_tokens})")
    ignore_eos = body.get("ignore_eos") or False
    if not isinstance(ignore_eos, bool):
        raise bad("ignore_eos", ignore_eos, "use true or false")
    return GenerationRequest(
        max_tokens=None if max_tokens is None else int(max_tokens),
        temperature=float(_number(body, "temperature", 1.0, low=0, high=2) or 0.0),
        top_p=float(_number(body, "top_p", 1.0, low=0, high=1) or 0.0),
        seed=secrets.randbits(63) if seed is None else int(seed) & ((1 << 64) - 1),
        stop=_stops(body.get("stop")),
        include_usage=bool(options.get("include_usage")),
        # -1 is vLLM's way to say "all".
        top_k=max(0, int(_number(body, "top_k", 0, low=-1, whole=True) or 0)),
        min_p=float(_number(body, "min_p", 0.0, low=0, high=1) or 0.0),
        presence_penalty=float(_number(body, "presence_penalty", 0.0, low=-2, high=2) or 0.0),
        frequency_penalty=float(_number(body, "frequency_penalty", 0.0, low=-2, high=2) or 0.0),
        repetition_penalty=float(_number(body, "repetition_penalty", 1.0, low=0.01, high=100) or 1.0),
        logit_bias=_logit_bias(body.get("logit_bias")),
        min_tokens=min_tokens,
        stop_token_ids=_token_ids(body.get("stop_token_ids")),
        ignore_eos=ignore_eos,
        n=int(_number(body, "n", 1, low=1, high=MAX_ANSWERS, whole=True) or 1),
        logprobs=_logprobs(surface, body),
        schema=schema,
        tools=tools,
    )


def chat_messages(body: Mapping[str, Any], tool_style: Style | None) -> list[dict[str, Any]]:
    """The `messages` of a chat body, checked for shape; the arguments of tool calls as objects, as templates want
    them. Raises BackendError (400), also for tools that a template without a `tool_style` could not tell about."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", messages, "use a list of at least one message")
    return [_message(f"messages[{index}]", message, tool_style) for index, message in enumerate(messages)]


def _message(at: str, message: Any, tool_style: Style | None) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad(at, message, 'use an object such as {"role": "user", "content": "…"}')
    content, calls = message.get("content"), message.get("tool_calls")
    if (calls or message["role"] == "tool") and tool_style is None:
        raise unsupported(at, message, "this model's chat template knows no tools")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise unsupported(f"{at}.content", part, "this model reads text parts only")
            if not isinstance(part.get("text"), str):
                raise bad(f"{at}.content", part, "a text part needs a string `text`")
    elif not isinstance(content, str) and not (content is None and calls):
        raise bad(f"{at}.content", content, "use a string or a list of text parts")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise bad(f"{at}.tool_calls", calls, "use a list of calls")
    read = [_tool_call(f"{at}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return {**message, "content": content or "", "tool_calls": read}


def _tool_call(at: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(at, call, 'use {"id": "…", "type": "function", "function": {"name": "…", "arguments": "{}"}}')
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        raise bad(f"{at}.function.arguments", function.get("arguments"), "use a string of JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def completion_prompt(body: Mapping[str, Any]) -> str | list[int]:
    """The one prompt of a completions body: text or token ids. Raises BackendError (400)."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(one, str | list) for one in prompt):
        raise bad("prompt", prompt, "the bundled cluster takes one prompt a request")
    raise bad("prompt", prompt, "use a non-empty string or a list of token ids")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise bad("stop", value, "use a non-empty string or a list of them")
    if len(stops) > MAX_STOPS:
        raise bad("stop", value, f"at most {MAX_STOPS} stop strings")
    return tuple(stops)


def _schema(value: Any) -> dict[str, Any] | None:
    """What `response_format` asks for, as a JSON schema."""
    remedy = 'use {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {…}}}'
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad("response_format", value, remedy)
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, dict):
        raise bad("response_format", value, remedy)
    return schema


def _logprobs(surface: Surface, body: Mapping[str, Any]) -> int | None:
    if surface == "completions":
        count = _number(body, "logprobs", None, low=0, high=MAX_LOGPROBS, whole=True)
        return None if count is None else int(count)
    wanted = body.get("logprobs") or False
    if not isinstance(wanted, bool):
        raise bad("logprobs", wanted, "use true or false; `top_logprobs` says how many")
    count = int(_number(body, "top_logprobs", 0, low=0, high=MAX_LOGPROBS, whole=True) or 0)
    if count and not wanted:
        raise bad("top_logprobs", count, "set logprobs to true with it")
    return count if wanted else None


def _logit_bias(value: Any) -> dict[int, float]:
    remedy = 'use an object of token ids and numbers from -100 to 100, such as {"42": -100}'
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise bad("logit_bias", value, remedy)
    biases = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit()):
            raise bad("logit_bias", value, remedy)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise bad("logit_bias", value, remedy)
        biases[int(token)] = float(bias)
    return biases


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise bad("stop_token_ids", value, "use a list of token ids")
    return tuple(value)


def _number(
    body: Mapping[str, Any],
    name: str,
    default: float | None,
    *,
    low: float,
    high: float | None = None,
    whole: bool = False,
) -> float | int | None:
    value = body.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    wanted = f"{'a whole number' if whole else 'a number'} " + (
        f"from {low} to {high}" if high is not None else f"of at least {low}"
    )
    if type(value) not in kinds or value < low or (high is not None and value > high) or value != value:
        raise bad(name, value, f"use {wanted}")
    return value  # type: ignore[no-any-return]
