"""What every pair of dialects has to offer, and what they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from backends.base import BackendError, Piece
from backends.hosted.sse import Splitter

Body = Mapping[str, Any]


class Answering(Protocol):
    """One answer on its way back."""

    def events(self, piece: Piece) -> bytes:
        """Of a stream: the client's events for the provider's."""

    def whole(self, piece: Piece) -> bytes:
        """The client's body for the provider's."""


@dataclass(frozen=True, slots=True)
class Translator:
    request: Callable[[Body], dict[str, Any]]
    """The provider's body for the client's. Raises BackendError for what cannot be carried."""
    answering: Callable[[Body], Answering]
    """For a request with that body, the client's."""


def cannot(param: str, why: str) -> BackendError:
    """A 400 after which a target that speaks the client's dialect may still be tried."""
    return BackendError(
        f"{param} cannot be carried to a target of this kind: {why}",
        status=400,
        param=param,
        code="unsupported_parameter",
    )


def malformed(param: str, remedy: str) -> BackendError:
    return BackendError(f"invalid {param}; {remedy}", status=400, param=param, code="invalid_value")


def json_events(splitter: Splitter, data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects among the events of `data`."""
    for event in splitter.feed(data):
        if event.data is not None and event.data != b"[DONE]":
            body = json.loads(event.data)
            if isinstance(body, dict):
                yield body


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def parsed_arguments(arguments: Any, param: str) -> dict[str, Any]:
    """Of a tool call, which OpenAI has as text."""
    try:
        value = json.loads(arguments or "{}")
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise malformed(param, "the arguments of a call must be a JSON object, as text")
    return value


def listed(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise malformed(param, "use a list")
    return value


def mapped(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise malformed(param, "use an object")
    return value
