"""A request as it came in, checked for what routing needs; the rest of the body is the provider's to judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.base import Surface
from policies import UNCHANGED, Goals, Overrides
from router.errors import invalid
from router.overrides import FIELD as OVERRIDES_FIELD
from router.overrides import read_overrides

SLO_FIELD = "slo"
"""Latency goals in a body: {"slo": {"ttft_ms": 400, "tpot_ms": 50}}. Never sent on."""
_GOALS = ("ttft_ms", "tpot_ms")
_OURS = frozenset({SLO_FIELD, OVERRIDES_FIELD})


@dataclass(frozen=True, slots=True)
class Incoming:
    """`body` is the client's, without the goals."""

    request_id: str
    surface: Surface
    body: Mapping[str, Any]
    model: str
    stream: bool
    max_tokens: int | None
    goals: Goals
    session: str | None = None
    """Names the conversation or user that the request belongs to."""
    priority: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that the policy asks for."""
    overrides: Overrides = UNCHANGED
    raw: bytes | None = None
    """The body as it came over the wire, goals and all."""
    dropped: frozenset[str] = frozenset()
    """What `raw` has that is not sent on."""
    key: str | None = None
    """The label of the key that it was let in by."""
    asked: Mapping[str, Any] | None = None
    """The `provider` object that the overrides were read from."""


def read(
    surface: Surface,
    body: Any,
    *,
    request_id: str,
    ttft_ms: Any = None,
    tpot_ms: Any = None,
    session: str | None = None,
    headers: Mapping[str, str] | None = None,
    raw: bytes | None = None,
    key: str | None = None,
) -> Incoming:
    """Check `body` and take the goals and the session from it; those given (header or argument) come before its own.

    Raises RouterError (400) that names the field, the value and the remedy.
    """
    if not isinstance(body, Mapping):
        raise invalid("body", body, "send a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("model", model, "use a name from GET /v1/models")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise invalid("stream", stream, "use true or false")
    if surface in ("chat.completions", "messages"):
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise invalid("messages", messages, "use a list of at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise invalid(f"messages[{index}]", message, 'use an object such as {"role": "user", "content": "…"}')
        if surface == "messages" and body.get("max_tokens") is None:
            raise invalid("max_tokens", None, "Anthropic's API requires a limit of the answer's length")
    elif surface == "embeddings":
        if not isinstance(body.get("input"), str | list) or not body["input"]:
            raise invalid("input", body.get("input"), "use a non-empty string, or a list of them or of token ids")
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise invalid("prompt", prompt, "use a non-empty string or a list of token ids")
    limits = [_limit(body, name) for name in ("max_completion_tokens", "max_tokens")]
    slo = body.get(SLO_FIELD)
    if slo is not None:
        if not isinstance(slo, Mapping) or not set(slo) <= set(_GOALS):
            raise invalid(SLO_FIELD, slo, 'use an object such as {"ttft_ms": 400, "tpot_ms": 50}')
        ttft_ms = slo.get("ttft_ms") if ttft_ms is None else ttft_ms
        tpot_ms = slo.get("tpot_ms") if tpot_ms is None else tpot_ms
    return Incoming(
        request_id=request_id,
        surface=surface,
        body={name: value for name, value in body.items() if name not in _OURS},
        model=model,
        stream=bool(stream),
        max_tokens=limits[0] if limits[0] is not None else limits[1],
        goals=Goals(_goal("ttft_ms", ttft_ms), _goal("tpot_ms", tpot_ms)),
        session=session or _session(body),
        priority=_priority(body),
        headers=headers or {},
        overrides=read_overrides(body.get(OVERRIDES_FIELD)),
        raw=raw,
        dropped=_OURS & body.keys(),
        key=key,
        asked=body.get(OVERRIDES_FIELD),
    )


def _priority(body: Mapping[str, Any]) -> float | None:
    """Engines such as vLLM know it too, so it is sent on."""
    value = body.get("priority")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid("priority", value, "use a number; higher is more urgent")
    return float(value)


def _session(body: Mapping[str, Any]) -> str | None:
    """What clients say it with, the narrowest first; providers take these too, so they are sent on."""
    metadata = body.get("metadata")
    # Anthropic's clients name the user there.
    named = metadata.get("session_id") or metadata.get("user_id") if isinstance(metadata, Mapping) else None
    for value in (named, body.get("prompt_cache_key"), body.get("safety_identifier"), body.get("user")):
        if isinstance(value, str) and value:
            return value
    return None


def _limit(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise invalid(name, value, "use a whole number of at least 1")
    return value


def _goal(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise invalid(name, value, "use a number of milliseconds above 0")
    return number
