"""The official clients on a router in the same process: code moves over by one line, and nothing goes over a socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

import policies
from backends.models import ModelFiles
from router import Router, SyncRouter
from router.chaos import TEXT, FakeProvider
from router.inprocess import official
from tests.router.policies import ASK, policy_of, router_of

MESSAGES: Any = ASK["messages"]


@pytest.mark.parametrize("model", ["ok", "bytes"])
async def test_openais_client_asks_streams_and_is_refused_as_over_the_network(
    provider: FakeProvider, model: str
) -> None:
    async with router_of(provider, model) as router:
        completions = router.chat.completions
        if model == "ok":
            answer = await completions.create(model="chat", messages=MESSAGES)
            assert isinstance(answer, openai.types.chat.ChatCompletion) and answer.choices[0].message.content == TEXT
        stream = await completions.create(model="chat", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        raw = await completions.with_raw_response.create(model="chat", messages=MESSAGES, stream=True)
        assert raw.headers["x-splitroute-target"] == "t0"
        assert [one.id async for one in router.openai.models.list()] == ["chat"]
        with pytest.raises(openai.NotFoundError, match="no route for model 'nope'"):
            await completions.create(model="nope", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            await completions.create(model="chat", messages=[])


async def test_it_can_be_called_beside_that(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        assert (await router.chat(**ASK)).text == TEXT


async def test_anthropics_client_does_too(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        messages = router.anthropic.messages
        assert (await messages.create(model="chat", messages=MESSAGES, max_tokens=50)).content[0].type == "text"
        async with messages.stream(model="chat", messages=MESSAGES, max_tokens=50) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
        assert (await messages.count_tokens(model="chat", messages=MESSAGES)).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError, match=r"no route for model 'nope'.*not_found_error"):
            await messages.create(model="nope", messages=MESSAGES, max_tokens=50)


async def test_a_cut_stream_raises_and_is_never_whole(provider: FakeProvider) -> None:
    """Portkey#1797"""
    async with router_of(provider, "cut:3") as router:
        stream = await router.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_leaving_a_stream_cancels_the_work_upstream(provider: FakeProvider) -> None:
    async with router_of(provider, "paced:50") as router:
        stream = await router.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(5):
            while not provider.requests[0].left_early:
                await asyncio.sleep(0.01)
        assert router._executor.state["t0"].inflight == 0


async def test_the_clients_own_timeout_holds(provider: FakeProvider) -> None:
    async with router_of(provider, "never-answers") as router:
        with pytest.raises(openai.APITimeoutError):
            await router.chat.completions.create(model="chat", messages=MESSAGES, timeout=0.2)
        assert router._executor.state["t0"].inflight == 0


async def test_a_slow_reader_holds_the_answer_back(provider: FakeProvider) -> None:
    async with router_of(provider, "huge:4000") as router:
        stream = await router.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        await asyncio.sleep(0.1)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert len("".join(text)) == 4000 << 10


def test_code_without_a_loop_has_them_as_well(provider: FakeProvider, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy_of(provider, "ok"))
    with SyncRouter.from_policy(file) as router:
        assert router.chat(**ASK).text == TEXT
        assert router.chat.completions.create(model="chat", messages=MESSAGES).choices[0].message.content == TEXT
        stream = router.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
        with router.anthropic.messages.stream(model="chat", messages=MESSAGES, max_tokens=50) as messages:
            assert "".join(messages.text_stream) == TEXT
        with pytest.raises(openai.NotFoundError):
            router.chat.completions.create(model="nope", messages=MESSAGES)


@pytest.mark.model
async def test_an_answer_is_parsed_into_a_pydantic_model(smollm2: ModelFiles) -> None:
    class City(pydantic.BaseModel):
        name: str
        inhabitants: int

    async with Router.from_text(policies.preset("local")) as router:
        answer = await router.chat.completions.parse(
            model="chat",
            messages=[{"role": "user", "content": "Paris has two million inhabitants. Name and number, as JSON."}],
            response_format=City,
            temperature=0,
            max_tokens=60,
        )
        assert isinstance(answer.choices[0].message.parsed, City)


def test_a_client_that_is_not_installed_is_named() -> None:
    with pytest.raises(ImportError, match=r"pip install 'splitroute\[clients\]'"):
        official("not_installed_here")


def test_nothing_of_them_is_imported_before_it_is_used() -> None:
    code = "import router.sdk, sys; print([name for name in ('openai', 'anthropic', 'uvicorn') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


async def test_what_the_transport_cannot_answer_is_a_transport_error(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the application: httpx raises, and nobody waits."""

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.gateway.app.Gateway.__call__", broken)
    async with router_of(provider, "ok") as router:
        with pytest.raises(openai.APIConnectionError) as raised:
            await router.chat.completions.create(model="chat", messages=MESSAGES)
        assert "RemoteProtocolError" in repr(raised.value.__cause__)
