"""Overload: who waits, who is turned away, and what a quota or a slow target costs the others."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from router import Router, RouterError
from router.chaos import TEXT, FakeProvider
from tests.router.policies import ASK


def router_of(provider: FakeProvider, targets: str, rule: str, resilience: str = "{deadline_ms: 5000}") -> Router:
    text = f"""
version: 1
providers: {{fake: {{type: openai, base_url: "{provider.url}", api_key: k}}}}
targets:
{targets}
classes:
  batch: {{when: {{metadata: {{job: nightly}}}}, priority: -1}}
  default: {{}}
routes: {{chat: [{rule}]}}
resilience: {resilience}
"""
    return Router.from_text(text, filename="p.yaml", env={})


def batch() -> dict[str, Any]:
    return {**ASK, "metadata": {"job": "nightly"}}


async def outcome(router: Router, **asked: Any) -> str:
    try:
        return (await router.chat(**asked)).text
    except RouterError as error:
        assert error.status in (429, 503) and error.code == "target_busy" and error.retry_after_s
        return "shed"


FULL = "  t0: {provider: fake, model: 'busy:100', limits: {concurrency: 1, queue: 2}}"


async def test_the_urgent_go_first_and_take_the_places_of_the_patient(provider: FakeProvider) -> None:
    async with router_of(provider, FULL, "{candidates: [t0], choose: in-order}") as router:
        order: list[str] = []

        async def ask(name: str, **asked: Any) -> str:
            got = await outcome(router, **asked)
            order.append(name)
            return got

        tasks = []
        for name, asked in (("running", batch()), ("b1", batch()), ("b2", batch()), ("urgent", ASK), ("u2", ASK)):
            tasks.append(asyncio.create_task(ask(name, **asked)))
            await asyncio.sleep(0.01)
        got = await asyncio.gather(*tasks)
        assert got == [TEXT, "shed", "shed", TEXT, TEXT]
        assert order[:2] == ["b2", "b1"] and order[2:] == ["running", "urgent", "u2"], (
            "the latest patient one leaves first"
        )
        assert not router._executor.state["t0"].inflight and not router._executor.state["t0"].reserved
        assert not len(router._executor.queues)


async def test_a_queue_has_a_bound_and_whoever_leaves_it_frees_a_place(provider: FakeProvider) -> None:
    async with router_of(provider, FULL, "{candidates: [t0], choose: in-order}") as router:
        tasks = [asyncio.create_task(outcome(router, **ASK)) for _ in range(4)]
        await asyncio.sleep(0.03)
        assert [task.done() and task.result() for task in tasks] == [False, False, False, "shed"]
        tasks[1].cancel()
        await asyncio.sleep(0)
        later = asyncio.create_task(outcome(router, **ASK))
        assert await tasks[0] == await tasks[2] == await later == TEXT
        state = router._executor.state["t0"]
        assert (state.inflight, state.reserved, len(router._executor.queues)) == (0, 0, 0)


async def test_who_cannot_be_served_before_its_deadline_is_told_at_once(provider: FakeProvider) -> None:
    target = FULL.replace("busy:100", "busy:300").replace("queue: 2", "queue: 50")
    async with router_of(provider, target, "{candidates: [t0], choose: in-order}", "{deadline_ms: 1000}") as router:
        assert await outcome(router, **ASK) == TEXT
        begun = time.monotonic()
        tasks = [asyncio.create_task(outcome(router, **ASK)) for _ in range(8)]
        await asyncio.sleep(0.05)
        told = sum(task.done() for task in tasks)
        assert told >= 4, "eight times 300 ms do not fit into a second"
        got = await asyncio.gather(*tasks)
        assert got.count(TEXT) >= 2 and time.monotonic() - begun < 1.5


async def test_a_full_target_is_passed_over_before_anybody_waits(provider: FakeProvider) -> None:
    targets = FULL + "\n  t1: {provider: fake, model: ok}"
    async with router_of(provider, targets, "{candidates: [t0, t1], choose: in-order}") as router:
        slow = asyncio.create_task(router.chat(**ASK))
        await asyncio.sleep(0.03)
        assert (await router.chat(**ASK)).target == "t1"
        assert (await slow).target == "t0"


async def test_two_targets_of_one_quota_cool_together(provider: FakeProvider) -> None:
    """litellm#34399: as many attempts as one target would get, not one more."""
    targets = "\n".join(
        f"  t{n}: {{provider: fake, model: 'bare:{code}', limits: {{quota: team}}}}"
        for n, code in enumerate((429, 429))
    )
    breaker = "{retries: 5, deadline_ms: 400, breaker: {open_ms: 100, most_ms: 100}}"
    async with router_of(provider, targets, "{candidates: [t0, t1], choose: round-robin}", breaker) as router:
        until = time.monotonic() + 1.0
        refused = 0
        while time.monotonic() < until:
            for error in await asyncio.gather(*(router.chat(**ASK) for _ in range(5)), return_exceptions=True):
                assert isinstance(error, RouterError) and error.status == 429 and error.retry_after_s is not None
                refused += 1
            await asyncio.sleep(0.01)
    # One for each time it opened, and those that were under way when it opened first.
    assert len(provider.requests) <= 5 + 1.0 / 0.1 + 5 and refused > 20


async def test_bad_requests_trip_no_breaker(provider: FakeProvider) -> None:
    """sglang#9312"""
    async with router_of(
        provider, "  t0: {provider: fake, model: 'bare:400'}", "{candidates: [t0], choose: in-order}"
    ) as router:
        for _ in range(20):
            with pytest.raises(RouterError) as refused:
                await router.chat(**ASK)
            assert refused.value.status == 400
    assert len(provider.requests) == 20


async def test_a_broken_target_is_left_alone_and_found_again(provider: FakeProvider) -> None:
    """sglang#31206: the next ones fail fast, or go elsewhere."""
    targets = "  t0: {provider: fake, model: 'flapping:0.4'}\n  t1: {provider: fake, model: ok}"
    resilience = "{breaker: {failures: 3, open_ms: 150}}"
    async with router_of(provider, targets, "{candidates: [t0, t1], choose: in-order}", resilience) as router:
        for _ in range(30):
            assert (await router.chat(**ASK)).target == "t1"
        assert len(provider.asked("flapping:0.4")) == 3
        why = (await router.explain(**ASK)).candidates[0].reason
        assert "failed (3 in a row; the last time with 503" in why and "tried again in" in why
        async with asyncio.timeout(10):
            while (await router.chat(**ASK)).target != "t0":
                await asyncio.sleep(0.02)
        assert len(provider.asked("flapping:0.4")) <= 8, "one probe at a time"


@pytest.mark.parametrize("most", ["0.5", "0.0001"])
async def test_no_further_attempt_costs_more_than_a_request_may(provider: FakeProvider, most: str) -> None:
    targets = (
        "  t0: {provider: fake, model: 'bare:503', price: {input: 1, output: 1}}\n"
        "  t1: {provider: fake, model: ok, price: {input: 1000, output: 1000}}"
    )
    async with router_of(
        provider, targets, "{candidates: [t0, t1], choose: in-order}", f"{{max_cost_usd: {most}, retries: 1}}"
    ) as router:
        if most == "0.5":
            assert (await router.chat(**ASK, max_tokens=50)).target == "t1"
        else:
            with pytest.raises(RouterError) as refused:
                await router.chat(**ASK, max_tokens=50)
            assert refused.value.status == 503 and {one.target for one in refused.value.attempts} == {"t0"}
    assert len(provider.asked("ok")) == (most == "0.5")


async def test_a_slow_first_attempt_gets_company_within_the_budget(provider: FakeProvider) -> None:
    """Dean & Barroso, The Tail at Scale: the first content wins, the loser is cancelled and accounted."""
    targets = (
        "  t0: {provider: fake, model: 'tail:10', price: {input: 1, output: 2}}\n  t1: {provider: fake, model: ok}"
    )
    resilience = "{hedge: {percent: 20}}"
    async with router_of(provider, targets, "{candidates: [t0, t1], choose: in-order}", resilience) as router:
        for _ in range(60):
            stream = router.stream(**ASK)
            assert "".join([event.text or "" async for event in stream]) == TEXT
        records = list(router.ledger)
        hedged = [record for record in records if len(record.attempts) > 1]
        assert 2 <= len(hedged) <= 60 * 0.2
        for record in hedged:
            first, second = sorted(record.attempts, key=lambda attempt: attempt.kind == "hedge")
            assert (first.kind, second.kind) == ("first", "hedge") and record.status == 200
            loser = first if record.target == "t1" else second
            assert loser.status == 499 and loser.error is not None and record.attempts[-1].target == record.target
        slow = [seen for seen in provider.asked("tail:10") if seen.left_early]
        assert slow, "the loser is cancelled upstream"
        assert not any(state.inflight for state in router._executor.state.values())


async def test_many_at_once_over_a_provider_that_fails_often_lose_and_double_nothing(provider: FakeProvider) -> None:
    targets = "  t0: {provider: fake, model: 'percent:30'}\n  t1: {provider: fake, model: ok}"
    resilience = "{ttft_timeout_ms: 300, deadline_ms: 8000, retries: 3}"
    async with router_of(provider, targets, "{candidates: [t0, t1], choose: in-order}", resilience) as router:

        async def ask() -> str:
            async with asyncio.timeout(8.5):
                return "".join([event.text or "" async for event in router.stream(**ASK)])

        answers = await asyncio.gather(*(ask() for _ in range(300)))
        assert answers == [TEXT] * 300
        assert len({record.request_id for record in router.ledger}) == 300
        assert not any(state.inflight for state in router._executor.state.values())
        assert b"splitroute_requests_in_flight 0.0" in router.ledger.metrics.text()
