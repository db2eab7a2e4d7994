"""Copies for a mirror: sent, observed, counted apart, and never felt by anybody."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from router import Router
from router.chaos import TEXT, FakeProvider
from router.mirroring import MOST_AT_ONCE
from tests.router.policies import ASK, policy_of


def _router(provider: FakeProvider, shadow: str) -> Router:
    text = policy_of(provider, "ok", shadow).replace(
        "{candidates: [t0, t1], choose: in-order}",
        "{candidates: [t0], choose: in-order, mirror: {target: t1, percent: 100}}",
    )
    return Router.from_text(text, filename="test.yaml", env={})


async def _until(true: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_mirror_gets_what_the_target_gets(provider: FakeProvider, stream: bool) -> None:
    async with _router(provider, "ok") as router:
        if stream:
            text = "".join([event.text or "" async for event in router.stream(**ASK)])
        else:
            text = (await router.chat(**ASK)).text
        assert text == TEXT
        await _until(lambda: b'outcome="answered",target="t1"} 1.0' in router.ledger.metrics.text())
        first, copy = sorted(provider.requests, key=lambda seen: str(seen.headers["x-request-id"]))
        assert copy.headers["x-request-id"] == first.headers["x-request-id"] + "-mirror"
        assert first.body["messages"] == copy.body["messages"]
        (record,) = router.ledger
        assert record.target == "t0" and len(record.attempts) == 1
        assert (router.state["t1"].predict(5) is not None) == stream, "the mirror's speed is learned"
        assert router.state["t1"].inflight == 0


async def test_a_mirror_that_fails_or_hangs_is_not_felt(provider: FakeProvider) -> None:
    async with _router(provider, "never-answers") as router:
        begun = time.monotonic()
        for _ in range(MOST_AT_ONCE + 3):
            assert (await router.chat(**ASK)).text == TEXT
        assert time.monotonic() - begun < 5
        assert b'outcome="left_out",target="t1"} 3.0' in router.ledger.metrics.text()
        assert len(provider.asked("never-answers")) <= MOST_AT_ONCE
    assert router.state["t1"].inflight == 0, "closing gives them up"


async def test_a_route_has_its_own_resilience(provider: FakeProvider) -> None:
    text = policy_of(provider, "status:500", "ok", retries=2)
    head, rules = text.split("  chat:\n")
    rule, rest = rules.split("resilience:")
    indented = "  " + rule.strip("\n")
    text = f"{head}  chat:\n    rules:\n{indented}\n    resilience: {{retries: 0}}\n  again:\n{rule}resilience:{rest}"
    async with Router.from_text(text, filename="test.yaml", env={}) as router:
        assert router.policy.resilience_of("chat").idle_timeout_ms == 2000, "the rest is everybody's"
        assert (await router.chat(**{**ASK, "model": "again"})).target == "t1"
        with pytest.raises(Exception, match="500"):
            await router.chat(**ASK)


async def test_predictions_are_compared_with_what_came(provider: FakeProvider) -> None:
    async with Router.from_text(policy_of(provider, "ok"), filename="test.yaml", env={}) as router:
        for _ in range(12):
            [event async for event in router.stream(**ASK, ttft_ms=5000)]
        shown = router.ledger.metrics.text().decode()
        assert 'splitroute_time_to_first_token_observed_over_predicted_count{target="t0"} 11.0' in shown
        counted = re.findall(r'goal_predictions_total{met="yes",predicted="0.9",target="t0"} (.*)', shown)
        assert counted and float(counted[0]) >= 5
        assert all(record.met for record in router.ledger)
