"""Attempts inside one deadline: what fails over, what does not, and what the caller is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router import Router, RouterError
from router.chaos import TEXT, FakeProvider, model_for_words
from tests.router.policies import ASK, policy_of, router_of


async def streamed(router: Router, **parameters: Any) -> tuple[str, Any]:
    stream = router.stream(**ASK, **parameters)
    text = "".join([event.text or "" async for event in stream])
    return text, stream


@pytest.mark.parametrize(
    "first",
    [
        "status:500",
        "status:503",
        "status:429",
        "status:401",
        "status:404",
        "cut:0",
        "ends-tidily:0",
        "error-event:0",
        "html",
        "redirects",
        model_for_words("prompt is too long: 10 tokens > 5 maximum"),
    ],
)
async def test_a_failure_before_content_moves_on_and_nobody_notices(provider: FakeProvider, first: str) -> None:
    """bifrost#5395: also an error event after the stream has begun, as long as no content was shown."""
    async with router_of(provider, first, "ok") as router:
        text, stream = await streamed(router)
        assert text == TEXT
        assert stream.target == "t1"
        answer = await stream.started()
        assert [(attempt.target, attempt.error is None) for attempt in answer.attempts] == [("t0", False), ("t1", True)]


@pytest.mark.parametrize("first", ["slow-first:30000", "never-answers", "role-then-silence", "comments-forever"])
async def test_the_first_token_timer_is_satisfied_by_content_alone(provider: FakeProvider, first: str) -> None:
    """litellm#5859, litellm#19909, livekit/agents#6171"""
    async with router_of(provider, first, "ok", ttft_timeout_ms=200) as router:
        text, stream = await streamed(router)
        assert (text, stream.target) == (TEXT, "t1")
        answer = await stream.started()
        assert answer.attempts[0].status == 504
        assert "ttft_timeout_ms" in (answer.attempts[0].error or "")
    assert provider.asked(first)[0].left_early


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_is_wrong_is_not_tried_elsewhere(provider: FakeProvider, stream: bool) -> None:
    """litellm#19216"""
    async with router_of(provider, "status:400", "ok") as router:
        with pytest.raises(RouterError, match="scripted 400") as refused:
            await (streamed(router) if stream else router.chat(**ASK))
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, "code_400", "p")
    assert len(provider.requests) == 1


async def test_the_last_error_is_shown(provider: FakeProvider) -> None:
    """litellm#19216: 429, then 400."""
    async with router_of(provider, "status:429", "status:400") as router:
        with pytest.raises(RouterError, match="scripted 400"):
            await router.chat(**ASK)


async def test_a_prompt_too_long_everywhere_says_so(provider: FakeProvider) -> None:
    words = model_for_words("prompt is too long: 10 tokens > 5 maximum")
    async with router_of(provider, words, words) as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**ASK)
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert len(provider.requests) == 2


async def test_each_wait_uses_the_newest_retry_after(provider: FakeProvider) -> None:
    """litellm#20722"""
    provider.retry_after = ["0.2", "0.01", "7"]
    async with router_of(provider, "status:429", retries=2) as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**ASK)
        assert refused.value.status == 429
        assert 6 < (refused.value.retry_after_s or 0) <= 7
    assert len(provider.requests) == 3


async def test_a_target_that_said_when_is_not_asked_before(provider: FakeProvider) -> None:
    """litellm#34399, litellm#27823: both on one quota; nobody is hammered, and the client is told when."""
    provider.retry_after = ["30"]
    async with router_of(provider, "status:429", "status:429", deadline_ms=5000) as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**ASK)
        assert refused.value.status == 429
        assert 20 < (refused.value.retry_after_s or 0) <= 30
        with pytest.raises(RouterError, match="too many requests; tried again in") as refused:
            await router.chat(**ASK)
        assert refused.value.status == 429 and refused.value.code == "targets_cooling_down"
        assert 20 < (refused.value.retry_after_s or 0) <= 30
    assert len(provider.requests) == 1, "the other target has the same quota, and so has the next request"


async def test_retries_are_counted_over_all_targets(provider: FakeProvider) -> None:
    async with router_of(provider, "status:500", "status:503", retries=3) as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**ASK)
        assert len(refused.value.attempts) == 4
    assert len(provider.requests) == 4


async def test_no_retries_means_one_attempt(provider: FakeProvider) -> None:
    async with router_of(provider, "status:500", "ok", retries=0) as router:
        with pytest.raises(RouterError):
            await router.chat(**ASK)
    assert len(provider.requests) == 1


async def test_whoever_stands_in_for_an_unstreamed_answer_needs_a_timer_of_the_attempt(provider: FakeProvider) -> None:
    async with router_of(provider, "never-answers", "ok", deadline_ms=400) as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**ASK)
        assert refused.value.status == 504 and len(refused.value.attempts) == 1
    async with router_of(provider, "never-answers", "ok", deadline_ms=4000, attempt_timeout_ms=200) as router:
        answer = await router.chat(**ASK)
        assert answer.text == TEXT and [attempt.status for attempt in answer.attempts] == [504, 200]


async def test_the_deadline_holds_over_all_attempts(provider: FakeProvider) -> None:
    async with router_of(
        provider, "never-answers", "never-answers", "never-answers", ttft_timeout_ms=200, deadline_ms=300
    ) as router:
        with pytest.raises(RouterError) as refused:
            await streamed(router)
        assert refused.value.status == 504
    assert len(provider.requests) == 2


@pytest.mark.parametrize(
    ("model", "status", "said"),
    [
        ("cut:3", 502, "broke"),
        ("ends-tidily:3", 502, "before the answer was complete"),
        ("error-event:3", 503, "fell over"),
        ("token-then-silence", 504, "idle_timeout_ms"),
        ("token-then-comments", 504, "idle_timeout_ms"),
    ],
)
async def test_a_failure_after_content_ends_in_an_error_and_no_failover(
    provider: FakeProvider, model: str, status: int, said: str
) -> None:
    """Portkey#1797, tensorzero#6328, litellm#19077"""
    async with router_of(provider, model, "ok", idle_timeout_ms=200) as router:
        stream = router.stream(**ASK)
        shown = ""
        with pytest.raises(RouterError) as failed:
            async for event in stream:
                shown += event.text or ""
        assert shown and TEXT.startswith(shown)
        assert failed.value.status == status and said in failed.value.message
        record = list(router.ledger)[-1]
        assert record.status == status and record.target == "t0"
    assert len(provider.requests) == 1


async def test_an_unstreamed_answer_that_breaks_fails_over(provider: FakeProvider) -> None:
    """Nothing was shown, so nothing is lost."""
    async with router_of(provider, "half-a-body", "ok") as router:
        result = await router.chat(**ASK)
        assert (result.text, result.target) == (TEXT, "t1")


async def test_credentials_refused_by_a_provider_are_the_gateways_problem(provider: FakeProvider) -> None:
    async with router_of(provider, "echoes-key") as router:
        with pytest.raises(RouterError) as refused:
            await router.chat(**ASK)
        assert refused.value.status == 502
        assert "sk-very-secret-key" not in str([refused.value, *refused.value.attempts])


async def test_an_unknown_model_lists_the_known_ones(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        with pytest.raises(RouterError, match="chat") as refused:
            await router.chat(**{**ASK, "model": "chta"})
        assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")


async def test_cancelling_counts_once_and_frees_the_target(provider: FakeProvider) -> None:
    """litellm#31499, litellm#37140"""
    async with router_of(provider, "paced:300") as router:
        asking = asyncio.create_task(router.chat(**ASK))
        streaming = asyncio.create_task(streamed(router))
        while len(provider.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        asking.cancel()
        streaming.cancel()
        await asyncio.gather(asking, streaming, return_exceptions=True)
        records = list(router.ledger)
        assert [record.error for record in records] == ["cancelled", "cancelled"]
        assert router._executor.state["t0"].inflight == 0
        assert b"splitroute_requests_in_flight 0.0" in router.ledger.metrics.text()


async def test_what_was_observed_informs_the_next_decision(provider: FakeProvider) -> None:
    async with router_of(provider, "paced:5") as router:
        for _ in range(6):
            await streamed(router)
        decision = await router.explain(**ASK, ttft_ms=5000)
        (candidate,) = decision.candidates
        assert candidate.ttft_ms is not None and candidate.ttft_ms > 0
        assert candidate.tpot_ms is not None and candidate.tpot_ms > 0
        assert candidate.p_meet == 1.0


async def test_the_record_has_cost_usage_and_times(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        _, stream = await streamed(router)
        (record,) = router.ledger
        assert record.usage is not None and record.usage.completion_tokens == 6
        assert record.cost_usd == pytest.approx((7 * 1 + 6 * 2) / 1e6)
        assert record.ttft_s is not None and 0 < record.ttft_s <= record.total_s
        assert stream.usage == record.usage


async def test_an_unstreamed_answer_is_recorded_as_answered(provider: FakeProvider) -> None:
    async with router_of(provider, "ok") as router:
        await router.chat(**ASK)
        (record,) = router.ledger
        assert (record.status, record.error, record.target) == (200, None, "t0")
        assert record.usage is not None and record.usage.prompt_tokens == 7
        assert record.ttft_s is None, "nobody saw when its first token came"


async def test_memory_of_requests_is_bounded(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm#12685"""
    monkeypatch.setattr("router.ledger.KEPT", 3)
    async with router_of(provider, "ok") as router:
        for _ in range(5):
            await router.chat(**ASK)
        assert len(list(router.ledger)) == 3


async def test_a_target_at_its_limit_is_passed_over_and_nobody_left_is_said(provider: FakeProvider) -> None:
    text = policy_of(provider, "paced:100", "ok").replace(
        "model: 'paced:100'", "model: 'paced:100', limits: {concurrency: 2}"
    )
    text = text.replace("routes:\n", "routes:\n  alone: [{candidates: [t0], choose: in-order}]\n")
    async with Router.from_text(text, filename="test.yaml", env={}) as router:
        streams = [router.stream(**ASK) for _ in range(3)]
        targets = [(await stream.started()).target for stream in streams]
        assert targets == ["t0", "t0", "t1"]
        with pytest.raises(RouterError, match="it has 2 requests under way, and its limit is 2") as refused:
            await router.chat(**{**ASK, "model": "alone"})
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "target_busy", 1.0)
        for stream in streams:
            assert "".join([event.text or "" async for event in stream]) == TEXT
        many = await asyncio.gather(*(streamed(router) for _ in range(8)))
        assert sum(stream.target == "t0" for _, stream in many) == 2, "also where they come at once"
        assert router.state["t0"].inflight == 0
