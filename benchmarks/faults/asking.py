"""One request, and what a client makes of its answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

HUNG_S = 12.0
"""A client that has waited so long is counted as one that hung."""


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    """`whole`; `error`; `half`: less than the answer, and nothing that says so; `hung`."""
    seconds: float
    """To the end."""
    ttft_s: float | None = None
    status: int = 0

    def __str__(self) -> str:
        kind = f"error {self.status}" if self.kind == "error" and self.status >= 400 else self.kind
        return f"{kind}, {self.seconds:.1f} s"


async def ask(
    client: httpx.AsyncClient,
    model: str,
    *,
    stream: bool,
    expected: str,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Outcome:
    begun = time.monotonic()
    first: list[float] = []
    status = 0
    try:
        async with asyncio.timeout(HUNG_S):
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream, **more}
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                status = response.status_code
                if status >= 400:
                    await response.aread()
                    kind = "error"
                elif stream:
                    kind = await _streamed(response, expected, first, begun)
                else:
                    kind = whole_kind(await response.aread(), expected)
    except TimeoutError:
        kind = "hung"
    except httpx.HTTPError:
        kind = "error"
    return Outcome(kind, time.monotonic() - begun, first[0] if first else None, status)


async def _streamed(response: httpx.Response, expected: str, first: list[float], begun: float) -> str:
    text = ""
    async for line in response.aiter_lines():
        piece = _content(line)
        if piece is None:
            return "error"
        text += piece
        if piece and not first:
            first.append(time.monotonic() - begun)
    return "whole" if text == expected else "half"


def streamed_kind(lines: Iterable[str], expected: str) -> str:
    """What an OpenAI client makes of these lines of a stream."""
    text = ""
    for line in lines:
        piece = _content(line)
        if piece is None:
            return "error"
        text += piece
    return "whole" if text == expected else "half"


def _content(line: str) -> str | None:
    """Of one line; None where a client raises."""
    if not line.startswith("data:") or line[5:].strip() == "[DONE]":
        return ""
    try:
        event = json.loads(line[5:])
    except ValueError:
        return None
    if event.get("error"):
        return None
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())


def whole_kind(data: bytes, expected: str) -> str:
    try:
        body = json.loads(data)
        if body.get("error"):
            return "error"
        return "whole" if body["choices"][0]["message"]["content"] == expected else "half"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "half"
