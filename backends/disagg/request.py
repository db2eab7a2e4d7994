"""OpenAI request bodies as the bundled cluster understands them. Torch-free.

What it cannot do yet is refused by name with 400 `unsupported_parameter`, never ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.base import BackendError, Surface

_COMMON = {"model", "stream", "stream_options", "temperature", "top_p", "seed", "stop", "max_tokens", "n"}
_COMMON |= {"presence_penalty", "frequency_penalty", "logit_bias"}
_COMMON |= {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"}  # as vLLM names them
_SURFACES: dict[str, set[str]] = {
    "chat.completions": _COMMON | {"messages", "max_completion_tokens"},
    "completions": _COMMON | {"prompt"},
}
_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Bookkeeping for the provider: the answer is the same without."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Not supported, but accepted with a value that asks for nothing (null always does)."""
MAX_STOPS = 16


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

    def highest_token_id(self) -> int:
        """Of those the body names; -1 where it names none."""
        return max([*self.logit_bias, *self.stop_token_ids], default=-1)


def parse_request(surface: Surface, body: Mapping[str, Any]) -> GenerationRequest:
    """Validate all but the prompt. Raises BackendError (400) naming field, value and remedy."""
    for name, value in body.items():
        if name in _SURFACES[surface] or name in _NO_EFFECT or value is None:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise _unsupported(name, value, "leave it out, or route this request to a target that supports it")
    if body.get("n") not in (None, 1):
        raise _unsupported("n", body["n"], "the bundled cluster gives one answer a request: use 1")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _number(body, name, None, low=1, whole=True)
    seed = _number(body, "seed", None, low=-(1 << 63), high=(1 << 64) - 1, whole=True)
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise _bad("stream_options", options, 'use an object such as {"include_usage": true}')
    min_tokens = int(_number(body, "min_tokens", 0, low=0, whole=True) or 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise _bad("min_tokens", min_tokens, f"use at most {name} ({max_tokens})")
    ignore_eos = body.get("ignore_eos") or False
    if not isinstance(ignore_eos, bool):
        raise _bad("ignore_eos", ignore_eos, "use true or false")
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
    )


def chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `messages` of a chat body, checked for shape. Raises BackendError (400)."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", messages, "use a list of at least one message")
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _bad(at, message, 'use an object such as {"role": "user", "content": "…"}')
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text":
                    raise _unsupported(f"{at}.content", part, "this model reads text parts only")
                if not isinstance(part.get("text"), str):
                    raise _bad(f"{at}.content", part, "a text part needs a string `text`")
        elif content is None and message.get("tool_calls"):
            raise _unsupported(f"{at}.tool_calls", message["tool_calls"], "this model calls no tools")
        elif not isinstance(content, str):
            raise _bad(f"{at}.content", content, "use a string or a list of text parts")
    return messages


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
        raise _bad("prompt", prompt, "the bundled cluster takes one prompt a request")
    raise _bad("prompt", prompt, "use a non-empty string or a list of token ids")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad("stop", value, "use a non-empty string or a list of them")
    if len(stops) > MAX_STOPS:
        raise _bad("stop", value, f"at most {MAX_STOPS} stop strings")
    return tuple(stops)


def _logit_bias(value: Any) -> dict[int, float]:
    remedy = 'use an object of token ids and numbers from -100 to 100, such as {"42": -100}'
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _bad("logit_bias", value, remedy)
    biases = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit()):
            raise _bad("logit_bias", value, remedy)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _bad("logit_bias", value, remedy)
        biases[int(token)] = float(bias)
    return biases


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise _bad("stop_token_ids", value, "use a list of token ids")
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
        raise _bad(name, value, f"use {wanted}")
    return value  # type: ignore[no-any-return]


def _unsupported(param: str, value: Any, remedy: str) -> BackendError:
    """Another target may take it: this code lets the router ask there."""
    return BackendError(
        f"{param}={_short(value)} is not supported by the bundled cluster; {remedy}",
        status=400,
        param=param,
        code="unsupported_parameter",
    )


def _bad(param: str, value: Any, remedy: str) -> BackendError:
    return BackendError(f"invalid {param}: {_short(value)}; {remedy}", status=400, param=param, code="invalid_value")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
