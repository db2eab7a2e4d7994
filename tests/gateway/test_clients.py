"""The clients that people use, by changing their base URL: the same matrix whatever API the target speaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from backends.models import ModelFiles
from router import Router
from router.chaos import CALLS, TEXT, FakeProvider
from tests.gateway.test_http import serving

ASK: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name, _ in CALLS
]
ANTHROPIC_TOOLS: Any = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name, _ in CALLS]
ARGUMENTS = [(name, json.loads(arguments)) for name, arguments in CALLS]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def policy(kind: str, url: str) -> str:
    scripts = ("ok", "calls", "status:400", "status:429", "status:529", "cut:3", "error-event:2", "token-then-silence")
    targets = "".join(
        f"  {name!r}: {{provider: api, model: {name!r}, price: {{input: 1, output: 2}}}}\n" for name in scripts
    )
    routes = "".join(f"  {name!r}: [{{candidates: [{name!r}], choose: in-order}}]\n" for name in scripts)
    provider = f"{{type: {kind}, base_url: {url!r}, api_key: sk-fake}}"
    limits = "{retries: 0, ttft_timeout_ms: 2000, idle_timeout_ms: 2000}"
    return f"version: 1\nproviders:\n  api: {provider}\ntargets:\n{targets}routes:\n{routes}resilience: {limits}\n"


@pytest_asyncio.fixture(params=["openai", "anthropic"])
async def url(request: pytest.FixtureRequest, provider: FakeProvider) -> AsyncIterator[str]:
    """A gateway in front of a target that speaks one or the other."""
    async with serving(Router.from_text(policy(request.param, provider.url), env={})) as served:
        yield served


# --- the openai client ------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def chat(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_openai_chat(chat: openai.AsyncOpenAI) -> None:
    answer = await chat.chat.completions.create(model="ok", messages=ASK)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 6, 13)


@pytest.mark.parametrize("include_usage", [True, False])
async def test_openai_stream(chat: openai.AsyncOpenAI, include_usage: bool) -> None:
    """litellm#9657: one usage chunk with no choices, or none."""
    stream = await chat.chat.completions.create(
        model="ok", messages=ASK, stream=True, stream_options={"include_usage": include_usage}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    told = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.total_tokens for usage in told] == ([13] if include_usage else [])
    assert not include_usage or chunks[-1].choices == []


async def test_openai_parallel_tools(chat: openai.AsyncOpenAI) -> None:
    answer = await chat.chat.completions.create(model="calls", messages=ASK, tools=TOOLS)
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls is not None
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == ARGUMENTS  # type: ignore[union-attr]


async def test_openai_parallel_tools_streamed(chat: openai.AsyncOpenAI) -> None:
    async with chat.chat.completions.stream(model="calls", messages=ASK, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    assert [(call.function.name, json.loads(call.function.arguments or "")) for call in calls] == ARGUMENTS


async def test_openai_results_of_tools_and_images_reach_the_target(
    chat: openai.AsyncOpenAI, provider: FakeProvider
) -> None:
    called = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in CALLS
    ]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": "call_get_weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_get_time", "content": "noon"},
    ]
    answer = await chat.chat.completions.create(model="ok", messages=messages, tools=TOOLS, stop=["END"])
    assert answer.choices[0].message.content == TEXT
    body = provider.requests[-1].body
    if provider.requests[-1].path.endswith("/messages"):
        assert body["system"] == "Be brief." and body["stop_sequences"] == ["END"] and body["max_tokens"] == 4096
        asked, said, results = body["messages"]
        assert asked["content"][1]["source"] == {"type": "base64", "media_type": "image/png", "data": PIXEL}
        assert [(block["name"], block["input"]) for block in said["content"]] == ARGUMENTS
        assert [(one["tool_use_id"], one["content"]) for one in results["content"]] == [
            ("call_get_weather", "rain"),
            ("call_get_time", "noon"),
        ]
        assert results["role"] == "user"
    else:
        assert body["messages"] == messages


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("status:400", openai.BadRequestError),
        ("status:429", openai.RateLimitError),
        ("status:529", openai.InternalServerError),
        ("nope", openai.NotFoundError),
    ],
)
async def test_openai_errors(chat: openai.AsyncOpenAI, model: str, error: type[openai.APIStatusError]) -> None:
    with pytest.raises(error) as refused:
        await chat.chat.completions.create(model=model, messages=ASK)
    assert model.startswith("nope") or f"scripted {model[-3:]}" in str(refused.value)
    if model == "status:429":
        assert refused.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("model", ["cut:3", "error-event:2"])
async def test_openai_a_stream_that_breaks_is_an_error(chat: openai.AsyncOpenAI, model: str) -> None:
    """Portkey#1797"""
    text = ""
    with pytest.raises(openai.APIError):
        async for chunk in await chat.chat.completions.create(model=model, messages=ASK, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text and TEXT.startswith(text) and text != TEXT


async def test_openai_leaving_cancels_the_work(chat: openai.AsyncOpenAI, provider: FakeProvider) -> None:
    """litellm#31499"""
    stream = await chat.chat.completions.create(model="token-then-silence", messages=ASK, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    for _ in range(100):
        if provider.requests[-1].left_early:
            return
        await asyncio.sleep(0.02)
    pytest.fail("the target still works for nobody")


# --- the anthropic client ---------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def messages(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


async def test_anthropic_message(messages: anthropic.AsyncAnthropic) -> None:
    answer = await messages.messages.create(model="ok", max_tokens=50, messages=ASK)
    (block,) = answer.content
    assert isinstance(block, anthropic.types.TextBlock) and block.text == TEXT
    assert answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == 7
    assert answer.usage.output_tokens == 6


async def test_anthropic_stream(messages: anthropic.AsyncAnthropic) -> None:
    async with messages.messages.stream(model="ok", max_tokens=50, messages=ASK) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == TEXT
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 6


@pytest.mark.parametrize("streamed", [True, False])
async def test_anthropic_parallel_tools(messages: anthropic.AsyncAnthropic, streamed: bool) -> None:
    asked: Any = {"model": "calls", "max_tokens": 50, "messages": ASK, "tools": ANTHROPIC_TOOLS}
    if streamed:
        async with messages.messages.stream(**asked) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await messages.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    assert [(block.name, block.input) for block in answer.content if block.type == "tool_use"] == ARGUMENTS


async def test_anthropic_results_of_tools_and_images_reach_the_target(
    messages: anthropic.AsyncAnthropic, provider: FakeProvider
) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    said: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                *[
                    {"type": "tool_use", "id": f"call_{name}", "name": name, "input": given}
                    for name, given in ARGUMENTS
                ],
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_get_weather", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "call_get_time", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    await messages.messages.create(
        model="ok",
        max_tokens=50,
        system="Be brief.",
        messages=said,
        tools=ANTHROPIC_TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
    )
    body = provider.requests[-1].body
    if provider.requests[-1].path.endswith("/messages"):
        assert body["messages"] == said and body["system"] == "Be brief."
        return
    assert [message["role"] for message in body["messages"]] == [
        "system", "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip
    assert body["messages"][1]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    assert [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in body["messages"][2]["tool_calls"]
    ] == ARGUMENTS
    assert [message["content"] for message in body["messages"][3:]] == ["rain", "noon", "And now?"]
    assert body["tool_choice"] == "required" and body["parallel_tool_calls"] is False
    assert body["stop"] == ["END"] and body["max_tokens"] == 50


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("status:400", anthropic.BadRequestError),
        ("status:429", anthropic.RateLimitError),
        ("status:529", anthropic.InternalServerError),
        ("nope", anthropic.NotFoundError),
    ],
)
async def test_anthropic_errors(
    messages: anthropic.AsyncAnthropic, model: str, error: type[anthropic.APIStatusError]
) -> None:
    with pytest.raises(error) as refused:
        await messages.messages.create(model=model, max_tokens=50, messages=ASK)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"].endswith("_error") and body["error"]["message"]
    assert refused.value.request_id


@pytest.mark.parametrize("model", ["cut:3", "error-event:2"])
async def test_anthropic_a_stream_that_breaks_is_an_error(messages: anthropic.AsyncAnthropic, model: str) -> None:
    text = ""
    with pytest.raises(anthropic.APIError):
        async with messages.messages.stream(model=model, max_tokens=50, messages=ASK) as stream:
            async for part in stream.text_stream:
                text += part
    assert text and TEXT.startswith(text) and text != TEXT


async def test_anthropic_counts_tokens(messages: anthropic.AsyncAnthropic) -> None:
    short = await messages.messages.count_tokens(model="ok", messages=ASK)
    long: Any = [{"role": "user", "content": "A sentence of some words. " * 100}]
    assert 0 < short.input_tokens < 20
    assert 400 < (await messages.messages.count_tokens(model="ok", messages=long)).input_tokens < 900


# --- both -------------------------------------------------------------------------------------------------


WRITTEN = (
    '{ "unknown_field" : {"a": 1.0, "b": 1e5, "c": 12345678901234567890},\n  "model":"ok", "temperature": 0.70,'
    '"messages":[{"role":"user","content":"\\u00fc \\ud83d\\ude00 ü \\"model\\": {", "x": null}], '
    '"max_tokens": 5 ,SLO "z": [ 1 , 2 ] }'
)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_the_same_dialect_is_relayed_byte_for_byte(provider: FakeProvider, kind: str) -> None:
    """Numbers, order, blanks, escapes and fields that nobody here knows."""
    path = "/v1/messages" if kind == "anthropic" else "/v1/chat/completions"
    async with serving(Router.from_text(policy(kind, provider.url), env={})) as url, httpx.AsyncClient() as client:
        answer = await client.post(url + path, content=WRITTEN.replace("SLO", ' "slo": {"ttft_ms": 5000},'))
        assert answer.status_code == 200, answer.text
    assert provider.requests[-1].raw == WRITTEN.replace("SLO", "").replace(" }", "}").encode()


async def test_embeddings_are_relayed(provider: FakeProvider) -> None:
    async with (
        serving(Router.from_text(policy("openai", provider.url), env={})) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        answer = await client.embeddings.create(model="ok", input=["a", "b"], encoding_format="float")
    assert answer.data[0].embedding == [0.5, -0.25] and answer.usage.prompt_tokens == 7
    assert provider.requests[-1].path == "/v1/embeddings"


async def test_what_a_target_has_nothing_for_goes_to_one_that_has(provider: FakeProvider) -> None:
    text = policy("anthropic", provider.url).replace("retries: 0", "retries: 1")
    text = text.replace("providers:\n", f"providers:\n  other: {{type: openai, base_url: {provider.url!r}}}\n")
    text = text.replace("targets:\n", "targets:\n  second: {provider: other, model: ok}\n")
    text = text.replace("'ok': [{candidates: ['ok'],", "'ok': [{candidates: ['ok', second],")
    async with (
        serving(Router.from_text(text, env={})) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        answer = await client.chat.completions.with_raw_response.create(model="ok", messages=ASK, seed=7)
        assert answer.headers["x-splitroute-target"] == "second"
        with pytest.raises(openai.BadRequestError, match="seed cannot be carried"):
            await client.chat.completions.create(model="calls", messages=ASK, seed=7)
        with pytest.raises(openai.BadRequestError, match="it serves messages, not embeddings"):
            await client.embeddings.create(model="calls", input="a")


@pytest.mark.model
@pytest.mark.slow
async def test_the_bundled_cluster_answers_both_clients(smollm2: ModelFiles) -> None:
    text = """
version: 1
providers: {own: {type: disagg, model: smollm2-135m, mode: unified, kv_tokens: 2048}}
targets: {tiny: {provider: own}}
routes: {tiny: [{candidates: [tiny], choose: in-order}]}
"""
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": question, "extra_body": {"temperature": 0}}
    async with (
        serving(Router.from_text(text, env={})) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as chat,
        anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as messages,
    ):
        said = (await chat.chat.completions.create(**asked)).choices[0].message.content
        assert said is not None and "Paris" in said
        async with messages.messages.stream(**asked) as stream:
            assert "".join([part async for part in stream.text_stream]) == said
            final = await stream.get_final_message()
        counted = await messages.messages.count_tokens(model="tiny", messages=question)
        usage = final.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.BadRequestError, match="exceed its context"):
            await messages.messages.create(**{**asked, "max_tokens": 9_000})
