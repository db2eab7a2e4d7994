"""The gateway over real sockets: shapes, headers, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from router import Router
from router.chaos import TEXT, FakeProvider
from router.gateway import generate
from router.gateway.app import create_app
from router.gateway.server import Server
from router.keys import Doorkeeper
from tests.router.policies import ASK, router_of

Serve = Callable[..., AbstractAsyncContextManager[str]]


@asynccontextmanager
async def serving(router: Router, doorkeeper: Doorkeeper | None = None) -> AsyncIterator[str]:
    """The gateway's URL while it serves `router`."""
    server = Server(create_app(router, doorkeeper), handle_signals=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = await server.start_on(listener)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


@asynccontextmanager
async def gateway(
    provider: FakeProvider, *models: str, **resilience: int
) -> AsyncIterator[tuple[httpx.AsyncClient, Router]]:
    router = router_of(provider, *models, **resilience)
    async with serving(router) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client, router


async def test_the_real_client_streams_and_does_not(provider: FakeProvider) -> None:
    router = router_of(provider, "ok")
    async with serving(router) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        whole = await client.chat.completions.create(model="chat", messages=ASK["messages"])
        assert whole.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(model="chat", messages=ASK["messages"], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        plain = await client.completions.create(model="chat", prompt="Once", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in plain]) == TEXT
        assert [model.id async for model in client.models.list()] == ["chat"]
        assert (await client.models.retrieve("chat")).owned_by == "splitroute"
        with pytest.raises(openai.NotFoundError, match="nope"):
            await client.chat.completions.create(model="nope", messages=ASK["messages"])
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")
        await client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_headers_name_target_decision_and_request(provider: FakeProvider, stream: bool) -> None:
    async with gateway(provider, "status:500", "ok") as (client, router):
        answer = await client.post(
            "/v1/chat/completions", json={**ASK, "stream": stream}, headers={"x-request-id": "mine-1"}
        )
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-splitroute-target"] == "t1"
        assert answer.headers["x-splitroute-route"] == "chat"
        assert answer.headers["x-splitroute-class"] == "default"
        assert answer.headers["x-splitroute-attempts"] == "2"
        assert "order=t0,t1" in answer.headers["x-splitroute-decision"]
        record = router.ledger.find("mine-1")
        assert record is not None and record.target == "t1"
    assert provider.requests[-1].headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize(
    ("headers", "more", "session"),
    [
        ({}, {}, None),
        ({"x-session-id": "s1"}, {"user": "u1"}, "s1"),
        ({}, {"user": "u1", "metadata": {"session_id": "s2"}}, "s2"),
        ({}, {"user": "u1"}, "u1"),
        ({}, {"user": 3}, None),
    ],
)
async def test_a_session_is_named_by_header_metadata_or_user(
    provider: FakeProvider, headers: dict[str, str], more: dict[str, object], session: str | None
) -> None:
    async with gateway(provider, "ok") as (client, router):
        seen = []
        choose = router._executor.choose
        router._executor.choose = lambda profile: (seen.append(profile.session), choose(profile))[1]  # type: ignore[method-assign]
        await client.post("/v1/chat/completions", json={**ASK, **more}, headers=headers)
        assert seen == [session]


async def test_overrides_are_carried_out_and_stay_here(provider: FakeProvider) -> None:
    async with gateway(provider, "ok", "ok") as (client, _):
        answer = await client.post("/v1/chat/completions", json={**ASK, "provider": {"order": ["t1"]}})
        assert answer.headers["x-splitroute-target"] == "t1"
        for asked, param, said in (
            ({"ordr": ["t1"]}, "provider.ordr", "there are order, only"),
            ({"only": ["t9"]}, "provider.only", "targets and providers are"),
            ({"only": "t1"}, "provider.only", "use a list of names"),
            ({"max_price": 3}, "provider.max_price", '{"prompt": 1, "completion": 2}'),
            ({"sort": "speed"}, "provider.sort", "use one of price, latency, throughput"),
            ({"preferred_max_latency": -1}, "provider.preferred_max_latency", "use a number above 0"),
            ({"allow_fallbacks": 1}, "provider.allow_fallbacks", "use true or false"),
            ({"data_collection": True}, "provider.data_collection", "use allow or deny"),
            (3, "provider", "use an object"),
        ):
            refused = await client.post("/v1/chat/completions", json={**ASK, "provider": asked})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param and said in refused.json()["error"]["message"]
        nobody = await client.post("/v1/chat/completions", json={**ASK, "provider": {"ignore": ["t0", "t1"]}})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (400, "no_candidate")
    assert "provider" not in provider.requests[0].body


@pytest.mark.parametrize("where", ["header", "body"])
async def test_goals_come_by_header_or_body_and_stay_here(provider: FakeProvider, where: str) -> None:
    async with gateway(provider, "ok") as (client, router):
        headers = {"x-slo-ttft-ms": "400", "x-slo-tpot-ms": "50"} if where == "header" else {}
        body = {**ASK, "slo": {"ttft_ms": 400, "tpot_ms": 50}} if where == "body" else ASK
        seen = []
        choose = router._executor.choose
        router._executor.choose = lambda profile: (seen.append(profile.goals), choose(profile))[1]  # type: ignore[method-assign]
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (seen[0].ttft_ms, seen[0].tpot_ms) == (400, 50)
    assert "slo" not in provider.requests[0].body


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "JSON object"),
        (b'"x"', 400, "JSON object"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"messages": []}', 400, "missing model"),
        (b'{"model": "chat"}', 400, "missing messages"),
        (b'{"model": "chat", "messages": []}', 400, "at least one message"),
        (b'{"model": 5, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid model: 5"),
        (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404, "no route for model 'nope'"),
        (b'{"model": "chat", "stream": "yes", "messages": [{"role": "user"}]}', 400, "invalid stream: 'yes'"),
        (b'{"model": "chat", "max_tokens": -1, "messages": [{"role": "user"}]}', 400, "invalid max_tokens: -1"),
    ],
)
async def test_a_body_that_is_wrong_is_an_openai_error(
    provider: FakeProvider, content: bytes, status: int, said: str
) -> None:
    async with gateway(provider, "ok") as (client, _):
        answer = await client.post("/v1/chat/completions", content=content)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert said in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    assert provider.requests == []


async def test_a_wrong_goal_header_is_named(provider: FakeProvider) -> None:
    async with gateway(provider, "ok") as (client, _):
        answer = await client.post("/v1/chat/completions", json=ASK, headers={"x-slo-ttft-ms": "fast"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "ttft_ms" and "'fast'" in answer.json()["error"]["message"]


async def test_a_body_too_large_is_refused(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_BODY_BYTES", 1 << 20)
    async with gateway(provider, "ok") as (client, _):
        answer = await client.post("/v1/chat/completions", content=b"x" * (2 << 20))
        assert answer.status_code == 413


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/rerank"), ("GET", "/x")])
async def test_what_is_not_served_is_said(provider: FakeProvider, method: str, path: str) -> None:
    async with gateway(provider, "ok") as (client, _):
        answer = await client.request(method, path)
        assert answer.status_code in (404, 405)
        assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


async def test_a_providers_refusal_reaches_the_client_whole(provider: FakeProvider) -> None:
    provider.retry_after = ["17"]
    async with gateway(provider, "status:429", retries=0) as (client, _):
        answer = await client.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 429
        assert 15 <= int(answer.headers["retry-after"]) <= 17
        assert answer.json()["error"]["code"] == "code_429"


async def test_a_cut_stream_ends_in_an_error_event_and_no_done(provider: FakeProvider) -> None:
    """Portkey#1797"""
    async with gateway(provider, "cut:3") as (client, _):
        answer = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
        lines = [line for line in answer.text.splitlines() if line]
        assert "error" in json.loads(lines[-1].removeprefix("data: "))
        assert "[DONE]" not in answer.text
    async with serving(router_of(provider, "cut:3")) as url:
        client_ = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        stream = await client_.chat.completions.create(model="chat", messages=ASK["messages"], stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        await client_.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["never-answers", "role-then-silence", "token-then-silence"])
async def test_a_client_that_leaves_cancels_the_work_upstream(provider: FakeProvider, model: str, stream: bool) -> None:
    """litellm#31499, litellm#37140"""
    async with gateway(provider, model, ttft_timeout_ms=60000, deadline_ms=60000) as (client, router):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={**ASK, "stream": stream}, timeout=0.4)
        for _ in range(300):
            if provider.requests[0].left_early and len(list(router.ledger)) == 1:
                break
            await asyncio.sleep(0.01)
        assert provider.requests[0].left_early
        assert [record.error for record in router.ledger] == ["cancelled"]
        assert router._executor.state["t0"].inflight == 0


async def test_a_backend_that_never_answers_holds_up_only_its_own(provider: FakeProvider) -> None:
    """production-stack#749"""
    async with gateway(provider, "never-answers", ttft_timeout_ms=60000, deadline_ms=60000) as (client, _):
        stuck = asyncio.create_task(client.post("/v1/chat/completions", json={**ASK, "stream": True}))
        while not provider.requests:
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_health_and_metrics(provider: FakeProvider) -> None:
    async with gateway(provider, "ok") as (client, _):
        health = (await client.get("/health")).json()
        assert health["status"] == "ok" and health["providers"]["fake"]["ok"]
        assert "sk-very" not in json.dumps(health)
        await client.post("/v1/chat/completions", json={**ASK, "stream": True})
        await client.post("/v1/chat/completions", json={**ASK, "model": "nope"})
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        for line in (
            'splitroute_requests_total{error="",status="200",surface="chat.completions"} 1.0',
            'splitroute_requests_total{error="model_not_found",status="404",surface="chat.completions"} 1.0',
            'splitroute_routing_decisions_total{choose="in-order",class="default",route="chat",target="t0"} 1.0',
            'splitroute_time_to_first_token_seconds_count{class="default",target="t0"} 1.0',
            'splitroute_time_per_output_token_seconds_count{class="default",target="t0"} 1.0',
            'splitroute_tokens_total{direction="output",target="t0"} 6.0',
            "splitroute_requests_in_flight 0.0",
        ):
            assert line in metrics.text, line


async def test_a_bug_is_500_without_a_traceback(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Router, "open", broken)
    async with gateway(provider, "ok") as (client, _):
        answer = await client.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret detail" not in answer.text


async def test_a_bug_after_content_was_sent_is_an_error_event(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("router.tried.Tried.next_piece", broken)
    async with gateway(provider, "ok") as (client, router):
        answer = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
        *_, last = [line for line in answer.text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "secret detail" not in answer.text and "[DONE]" not in answer.text
        assert b"splitroute_requests_in_flight 0.0" in router.ledger.metrics.text()


@pytest.mark.parametrize("model", ["slow-first:300", "paced:120"])
async def test_a_silent_stream_says_that_it_is_still_coming(provider: FakeProvider, model: str) -> None:
    """litellm#34374"""
    async with gateway(provider, model, keepalive_ms=50) as (client, _):
        answer = await client.post(
            "/v1/chat/completions", json={**ASK, "stream": True}, headers={"x-request-id": "a-1"}
        )
        assert answer.headers["x-request-id"] == "a-1" and answer.headers["content-type"].startswith(
            "text/event-stream"
        )
        assert answer.text.count(": keep-alive\n\n") >= 4
    async with serving(router_of(provider, model, keepalive_ms=50)) as url:
        ours = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        stream = await ours.chat.completions.create(model="chat", messages=ASK["messages"], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        await ours.close()
        theirs = anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0)
        async with theirs.messages.stream(model="chat", messages=ASK["messages"], max_tokens=50) as messages:
            assert "".join([text async for text in messages.text_stream]) == TEXT
        await theirs.close()


async def test_a_failure_after_a_keep_alive_is_an_error_event(provider: FakeProvider) -> None:
    async with gateway(provider, "never-answers", keepalive_ms=50, deadline_ms=300) as (client, router):
        answer = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
        assert answer.status_code == 200 and answer.text.startswith(": keep-alive\n\n")
        *_, last = [line for line in answer.text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout" and "[DONE]" not in answer.text
        assert next(iter(router.ledger)).status == 504


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_not_lost_to_its_bookkeeping(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """A prediction of 0 ms, by which a metric was divided, once cut an answer short."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    async with gateway(provider, "ok") as (client, router):
        monkeypatch.setattr(router.ledger.metrics, "observe", broken)
        answer = await client.post("/v1/chat/completions", json={**ASK, "stream": stream})
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n" if stream else "}")
        assert "could not be recorded" in caplog.text
        assert router._executor.state["t0"].inflight == 0


async def test_a_hundred_clients_at_once(provider: FakeProvider) -> None:
    async with gateway(provider, "paced:5") as (client, router):
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json={**ASK, "stream": True}) for _ in range(100))
        )
        assert all("[DONE]" in answer.text for answer in answers)
        assert len(list(router.ledger)) == 100
