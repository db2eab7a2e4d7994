"""The SDK's faces: typed results, streams, the sync router, and arguments that are wrong."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from router import PolicyError, Router, RouterError, SyncRouter
from router.chaos import TEXT, FakeProvider
from tests.router.policies import ASK, policy_of, router_of


async def test_chat_returns_a_typed_result(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        result = await router.chat(**ASK, ttft_ms=400, temperature=0)
    assert result.text == TEXT
    assert result.finish_reason == "stop"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (7, 6)
    assert result.target == "t0" and result.decision.route == "chat"
    assert result.raw["id"] == "fake-1"
    assert result.transfer is None
    assert "slo" not in provider.requests[0].body and "ttft_ms" not in provider.requests[0].body


async def test_complete_continues_a_prompt(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        assert (await router.complete(model="chat", prompt="Once")).text == TEXT
    assert provider.requests[0].path == "/v1/completions"


async def test_a_router_starts_itself_on_first_use(provider: FakeProvider) -> None:
    router = router_of(provider, "ok")
    assert (await router.chat(**ASK)).text == TEXT
    await router.aclose()
    await router.aclose()


async def test_a_stream_left_early_is_cancelled_upstream(provider: FakeProvider) -> None:
    async with router_of(provider, "paced:100") as router:
        async with router.stream(**ASK) as stream:
            async for event in stream:
                if event.text:
                    break
        assert [record.error for record in router.ledger] == ["cancelled"]
        while not provider.requests[0].left_early:
            await asyncio.sleep(0.01)


async def test_explain_sends_nothing(provider: FakeProvider) -> None:
    async with router_of(provider, "ok", "ok") as router:
        decision = await router.explain(**ASK, ttft_ms=500)
        assert decision.order == ("t0", "t1")
        assert decision.to_dict()["class"] == "default"
    assert provider.requests == []


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "at least one message"),
        ({"messages": ["hi"]}, "messages[0]", '{"role": "user"'),
        ({"model": ""}, "model", "GET /v1/models"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens", "at least 1"),
        ({"ttft_ms": 0}, "ttft_ms", "above 0"),
        ({"ttft_ms": "soon"}, "ttft_ms", "'soon'"),
        ({"tpot_ms": float("nan")}, "tpot_ms", "above 0"),
        ({"tpot_ms": True}, "tpot_ms", "above 0"),
        ({"slo": 5}, "slo", "ttft_ms"),
        ({"slo": {"ttft": 5}}, "slo", "ttft_ms"),
    ],
)
async def test_wrong_arguments_name_field_value_and_remedy(
    provider: FakeProvider, changes: dict[str, Any], param: str, said: str
) -> None:
    async with router_of(provider, "ok") as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**{**ASK, **changes})
    assert (refused.value.status, refused.value.param) == (400, param)
    assert said in refused.value.message
    assert provider.requests == []


def test_the_sync_router_does_the_same(provider: FakeProvider, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy_of(provider, "ok"))
    with SyncRouter.from_policy(file) as router:
        assert router.chat(**ASK).text == TEXT
        assert "".join(event.text or "" for event in router.stream(**ASK)) == TEXT
        assert router.complete(model="chat", prompt="Once").text == TEXT
        assert router.explain(**ASK).order == ("t0",)
        with pytest.raises(RouterError):
            router.chat(model="nope", messages=[{"role": "user", "content": "x"}])
    router.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "splitroute"]


def test_a_sync_stream_left_early_is_cancelled(provider: FakeProvider, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy_of(provider, "paced:100"))
    with SyncRouter.from_policy(file) as router:
        stream = router.stream(**ASK)
        assert next(event.text for event in stream if event.text) == "One"
        stream.close()
        assert [record.error for record in router.router.ledger] == ["cancelled"]


def test_a_policy_that_is_wrong_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nproviders: {a: {type: openai}}\ntargets: {t: {provider: b, model: m}}\n")
    with pytest.raises(PolicyError) as refused:
        Router.from_policy(file)
    assert f"{file}:3:" in str(refused.value)
    assert "did you mean 'a'?" in str(refused.value) or "known: a" in str(refused.value)


def test_unknown_names_are_attribute_errors() -> None:
    import router

    with pytest.raises(AttributeError, match="Rooter"):
        router.Rooter  # noqa: B018
    assert "Router" in dir(router)
