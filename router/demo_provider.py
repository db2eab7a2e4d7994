"""A small OpenAI-compatible API that `splitroute demo` starts as "the hosted API", and that says what it is."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from policies import estimate_prompt_tokens
from router.gateway.server import Server

MODEL = "demo-model"
_WORD_S = 0.02
"""Between two words: about the pace of a hosted model."""


def demo_app() -> Starlette:
    """Chat and plain completions, streamed or not, and the list of its one model."""
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _chat, methods=["POST"]),
            Route("/v1/completions", _completion, methods=["POST"]),
            Route("/v1/models", _models),
        ]
    )


async def _chat(request: Request) -> Response:
    return await _answer(request, "chat.completions")


async def _completion(request: Request) -> Response:
    return await _answer(request, "completions")


async def _models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "demo"}]})


async def _answer(request: Request, surface: str) -> Response:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        error = {"message": "send a JSON object", "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status_code=400)
    prompt_tokens = estimate_prompt_tokens(surface, body).tokens
    text = (
        "This answer comes from splitroute's demo provider, which stands in for a hosted API. "
        f"Your prompt has about {prompt_tokens} tokens."
    )
    words = [word if index == 0 else f" {word}" for index, word in enumerate(text.split(" "))]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    finish = "stop"
    if isinstance(limit, int) and limit < len(words):
        words, finish = words[:limit], "length"
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(words),
        "total_tokens": prompt_tokens + len(words),
    }
    if body.get("stream"):
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        stream = _stream(surface, words, finish, usage if with_usage else None)
        return StreamingResponse(stream, media_type="text/event-stream")
    text = "".join(words)
    content = {"message": {"role": "assistant", "content": text}} if surface == "chat.completions" else {"text": text}
    choice = {"index": 0, "finish_reason": finish, "logprobs": None, **content}
    kind = "chat.completion" if surface == "chat.completions" else "text_completion"
    return JSONResponse({**_envelope(kind), "choices": [choice], "usage": usage})


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": "demo-1", "object": kind, "created": int(time.time()), "model": MODEL}


async def _stream(surface: str, words: list[str], finish: str, usage: dict[str, int] | None) -> AsyncIterator[bytes]:
    chat = surface == "chat.completions"
    envelope = _envelope("chat.completion.chunk" if chat else "text_completion")

    def event(choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return b"data: " + json.dumps({**envelope, "choices": choices, **extra}).encode() + b"\n\n"

    def choice(text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        content = {"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""}
        return {"index": 0, "finish_reason": finish_reason, **content}

    if chat:
        yield event([{"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": ""}}])
    for word in words:
        await asyncio.sleep(_WORD_S)
        yield event([choice(word)])
    yield event([choice(None, finish)])
    if usage is not None:
        yield event([], usage=usage)
    yield b"data: [DONE]\n\n"


class DemoProvider:
    """The API on a free loopback port, in the running event loop."""

    def __init__(self) -> None:
        self._server = Server(demo_app(), handle_signals=False)
        self._serving: asyncio.Task[None] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))

    async def start(self) -> str:
        """Serve; returns the base URL."""
        self._serving = await self._server.start_on(self._listener)
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    async def aclose(self) -> None:
        """Stop. Safe to call twice, and without a start."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            await serving
        self._listener.close()
