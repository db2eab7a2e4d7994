"""The hosted backend against a provider that misbehaves in every way providers do."""

from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends.base import BackendError, Call, Piece, Surface
from backends.hosted.openai import OpenAIBackend
from backends.options import OpenAIOptions
from router.chaos import TEXT, FakeProvider, model_for_words

KEY = "sk-very-secret-key"


@pytest.fixture
async def backend(provider: FakeProvider) -> AsyncIterator[OpenAIBackend]:
    backend = OpenAIBackend("fake", OpenAIOptions.model_validate({"base_url": provider.url, "api_key": KEY}))
    await backend.start()
    yield backend
    await backend.aclose()


def call(model: str, *, stream: bool = True, surface: Surface = "chat.completions", **parameters: Any) -> Call:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if surface == "chat.completions" else {"prompt": "hi"}
    )
    body = {"model": model, **({"stream": True} if stream else {}), **prompt, **parameters}
    return Call("req-1", surface, body, stream)


async def pieces_of(backend: OpenAIBackend, request: Call) -> list[Piece]:
    reply = await backend.open(request)
    try:
        return [piece async for piece in reply]
    finally:
        await reply.aclose()


async def failure_of(backend: OpenAIBackend, request: Call) -> BackendError:
    with pytest.raises(BackendError) as failed:
        await pieces_of(backend, request)
    assert KEY not in str(failed.value)
    return failed.value


def text_of(pieces: list[Piece]) -> str:
    text = ""
    for line in b"".join(piece.data for piece in pieces).decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@pytest.mark.parametrize("model", ["ok", "bytes", "paced:1"])
@pytest.mark.parametrize("surface", ["chat.completions", "completions"])
async def test_a_stream_is_relayed_whole(backend: OpenAIBackend, model: str, surface: Surface) -> None:
    pieces = await pieces_of(backend, call(model, surface=surface))
    assert text_of(pieces) == TEXT
    assert pieces[-1].done
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 6


async def test_bytes_are_the_providers_own(backend: OpenAIBackend) -> None:
    data = b"".join(piece.data for piece in await pieces_of(backend, call("bytes")))
    assert data.startswith(b": hello\r\n\r\ndata: {")
    assert data.endswith(b"data: [DONE]\n\n")


async def test_comments_and_role_frames_are_not_content(backend: OpenAIBackend) -> None:
    """livekit/agents#6171"""
    pieces = await pieces_of(backend, call("bytes"))
    first = next(index for index, piece in enumerate(pieces) if piece.content)
    assert b'"One"' in pieces[first].data
    assert not any(b'"content": "O' in piece.data for piece in pieces[:first])


@pytest.mark.parametrize("surface", ["chat.completions", "completions"])
async def test_an_unstreamed_answer_is_one_piece(backend: OpenAIBackend, surface: Surface) -> None:
    (piece,) = await pieces_of(backend, call("ok", stream=False, surface=surface))
    assert piece.done and piece.content
    assert TEXT in piece.data.decode()
    assert piece.usage is not None and piece.usage.prompt_tokens == 7


async def test_the_request_goes_out_as_it_came(backend: OpenAIBackend, provider: FakeProvider) -> None:
    await pieces_of(backend, call("ok", stream=False, temperature=0.5, unknown_to_us={"a": "ü"}))
    (seen,) = provider.requests
    assert seen.path == "/v1/chat/completions"
    assert seen.body["temperature"] == 0.5 and seen.body["unknown_to_us"] == {"a": "ü"}
    assert "stream_options" not in seen.body
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.headers["x-request-id"] == "req-1"


@pytest.mark.parametrize(
    ("options", "chunks"), [(None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]
)
async def test_usage_is_always_known_and_shown_only_where_asked_for(
    backend: OpenAIBackend, options: dict[str, bool] | None, chunks: int
) -> None:
    """litellm#9657, litellm#23847"""
    pieces = await pieces_of(backend, call("ok", stream_options=options))
    data = b"".join(piece.data for piece in pieces)
    assert data.count(b'"choices": []') == chunks
    assert pieces[-1].usage is not None


async def test_usage_refused_upstream_is_left_out_and_asked_for_no_more(
    backend: OpenAIBackend, provider: FakeProvider
) -> None:
    """litellm#23847"""
    for _ in range(2):
        assert text_of(await pieces_of(backend, call("refuses-stream-options"))) == TEXT
    assert ["stream_options" in seen.body for seen in provider.requests] == [True, False, False]


@pytest.mark.parametrize("model", ["cut:3", "ends-tidily:3", "ends-tidily:0"])
async def test_a_cut_stream_is_never_passed_off_as_complete(backend: OpenAIBackend, model: str) -> None:
    """Portkey#1797"""
    error = await failure_of(backend, call(model))
    assert error.status == 502
    assert error.code in ("stream_cut", "connection_broken")


async def test_an_error_in_the_stream_keeps_what_came_before(backend: OpenAIBackend) -> None:
    reply = await backend.open(call("error-event:3"))
    pieces = []
    with pytest.raises(BackendError, match="the model fell over") as failed:
        async for piece in reply:
            pieces.append(piece)
    await reply.aclose()
    assert text_of(pieces) == "One two three"
    assert failed.value.status == 503


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 500, 503])
async def test_an_error_status_keeps_what_the_provider_said(backend: OpenAIBackend, status: int) -> None:
    error = await failure_of(backend, call(f"status:{status}"))
    assert error.status == status
    assert f"fake: scripted {status}" in error.message
    assert (error.code, error.param) == (f"code_{status}", "p")


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 10000 tokens",
        "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens.",
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "the request exceeds the available context size. try increasing the context size",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 200 `max_new_tokens`",
        "Input validation error: inputs tokens must have less than 1024 tokens",
        "The prompt (total length 5000) is longer than the maximum model length of 4096.",
        "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
        "Input is too long for requested model.",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    ],
)
async def test_each_engines_words_for_too_long_are_understood(backend: OpenAIBackend, message: str) -> None:
    """litellm#10793"""
    error = await failure_of(backend, call(model_for_words(message)))
    assert (error.status, error.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("message", ["temperature must be at most 2", "the context manager failed", "too many tools"])
async def test_other_refusals_are_not_taken_for_too_long(backend: OpenAIBackend, message: str) -> None:
    error = await failure_of(backend, call(model_for_words(message)))
    assert error.code != "context_length_exceeded"


@pytest.mark.parametrize(("header", "seconds"), [("5", 5.0), ("0", 0.0), ("-3", 0.0), ("soon", None)])
async def test_retry_after_is_read(
    backend: OpenAIBackend, provider: FakeProvider, header: str, seconds: float | None
) -> None:
    provider.retry_after = [header]
    assert (await failure_of(backend, call("status:429"))).retry_after_s == seconds


async def test_retry_after_may_be_a_date(backend: OpenAIBackend, provider: FakeProvider) -> None:
    provider.retry_after = [email.utils.formatdate(time.time() + 100, usegmt=True)]
    wait = (await failure_of(backend, call("status:429"))).retry_after_s
    assert wait is not None and 90 < wait <= 100


async def test_a_provider_that_echoes_the_key_does_not_spread_it(backend: OpenAIBackend) -> None:
    error = await failure_of(backend, call("echoes-key"))
    assert "***" in error.message
    assert KEY not in json.dumps(dict(backend.health().detail))
    assert KEY not in repr(backend.options)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_page_where_an_answer_should_be_is_an_error(backend: OpenAIBackend, stream: bool) -> None:
    error = await failure_of(backend, call("html", stream=stream))
    assert error.status == 502
    assert "text/html" in error.message and "base_url" in (error.hint or "")


async def test_half_a_body_is_an_error(backend: OpenAIBackend) -> None:
    assert (await failure_of(backend, call("half-a-body", stream=False))).status == 502


async def test_a_redirect_is_not_followed(backend: OpenAIBackend) -> None:
    """It would carry the key to another host."""
    assert "redirect" in (await failure_of(backend, call("redirects"))).message


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    backend = OpenAIBackend("gone", OpenAIOptions(base_url=f"http://127.0.0.1:{port}/v1"))
    await backend.start()
    error = await failure_of(backend, call("ok"))
    assert error.status == 503
    assert f"127.0.0.1:{port}" in error.message and "refused" in error.message
    await backend.aclose()


@pytest.mark.parametrize("model", ["paced:200", "never-answers", "comments-forever"])
async def test_closing_early_cancels_the_work_upstream(
    backend: OpenAIBackend, provider: FakeProvider, model: str
) -> None:
    """litellm#31499"""

    async def read() -> None:
        reply = await backend.open(call(model))
        try:
            async for _ in reply:
                pass
        finally:
            await reply.aclose()

    reading = asyncio.create_task(read())
    while not provider.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    for _ in range(200):
        if provider.requests[0].left_early:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the provider was not told")
