"""Workers are killed, stopped and hung under real requests: no answer is lost, cut, or said twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.base import BackendError
from backends.disagg import cluster as clusters
from backends.disagg.backend import DisaggBackend
from backends.disagg.handle import WorkerHandle
from backends.models import ModelFiles
from tests.disagg.serving import LONG, Spoken, all_blocks_free, ask, cluster_of, pid_of, started, until

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ANSWER = 120
"""Tokens: a second or two of decoding, in which to be killed."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(smollm2: ModelFiles) -> AsyncIterator[DisaggBackend]:
    """One prefill and two decode workers."""
    backend = await started(decode=2, disaggregate="always", threads=1)
    yield backend
    await backend.aclose()


async def everybody_up(backend: DisaggBackend) -> None:
    await until(lambda: all(worker.up for worker in cluster_of(backend).workers), "every worker is up")


def prefilled(backend: DisaggBackend) -> int:
    return sum(worker.prefilled_tokens for worker in cluster_of(backend).workers)


async def answer(backend: DisaggBackend, number: int) -> Spoken:
    """A long greedy answer to a prompt of its own."""
    prompt = f"Story {number}. {LONG[: 900 + 40 * number]} Go on with the story."
    return await ask(backend, prompt, max_tokens=ANSWER, ignore_eos=True)


def speakers(backend: DisaggBackend, tokens: int = 4) -> list[WorkerHandle]:
    """The decode workers in the middle of an answer, more than `tokens` into it."""
    return [
        worker
        for worker in cluster_of(backend).decode
        if any(one.serving is worker and len(one.tokens) > tokens for one in worker.active.values())
    ]


async def test_a_killed_decode_workers_answers_go_on_elsewhere_and_no_prompt_is_computed_again(
    split: DisaggBackend,
) -> None:
    """dynamo, vLLM and SGLang fail them. Here another decode worker pulls the same KV."""
    await everybody_up(split)
    undisturbed = [(await answer(split, number)).text for number in range(3)]
    cluster = cluster_of(split)
    before = prefilled(split), cluster.recoveries
    speaking = [asyncio.create_task(answer(split, number)) for number in range(3)]
    await until(lambda: bool(speakers(split, 8)), "somebody is speaking")
    os.kill(pid_of(speakers(split, 8)[0]), signal.SIGKILL)
    assert [spoken.text for spoken in await asyncio.gather(*speaking)] == undisturbed
    assert cluster.recoveries > before[1]
    # The prompts were in the prefix cache: what is computed is their last blocks' rest.
    assert prefilled(split) - before[0] <= 3 * 16
    assert sum(worker.replayed_tokens for worker in cluster.workers) > 0
    await everybody_up(split)
    await all_blocks_free(split)


async def test_where_no_decode_worker_is_left_the_prefill_worker_goes_on_itself(split: DisaggBackend) -> None:
    await everybody_up(split)
    undisturbed = (await answer(split, 7)).text
    cluster = cluster_of(split)
    before = prefilled(split)
    speaking = asyncio.create_task(answer(split, 7))
    await until(lambda: bool(speakers(split)), "somebody is speaking")
    for worker in cluster.decode:
        os.kill(pid_of(worker), signal.SIGKILL)
    assert (await speaking).text == undisturbed
    assert prefilled(split) - before <= 16
    await everybody_up(split)
    await all_blocks_free(split)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.8])
async def test_a_killed_prefill_workers_requests_are_computed_elsewhere(split: DisaggBackend, after_s: float) -> None:
    """sglang#12779: decode stays up; here even those whose prompt was being computed get their answers."""
    await everybody_up(split)
    undisturbed = [(await answer(split, number)).text for number in (8, 9)]
    (victim,) = cluster_of(split).prefill
    decoding = [pid_of(worker) for worker in cluster_of(split).decode]
    speaking = [asyncio.create_task(answer(split, number)) for number in (8, 9)]
    await until(lambda: bool(victim.active), "they have arrived")
    await asyncio.sleep(after_s)
    os.kill(pid_of(victim), signal.SIGKILL)
    assert [spoken.text for spoken in await asyncio.gather(*speaking)] == undisturbed
    assert [pid_of(worker) for worker in cluster_of(split).decode] == decoding
    await everybody_up(split)
    await all_blocks_free(split)


async def test_a_hung_worker_is_killed_and_its_answers_go_on_elsewhere(
    split: DisaggBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await everybody_up(split)
    undisturbed = (await answer(split, 10)).text
    monkeypatch.setattr(clusters, "_SILENCE_S", 6.0)
    cluster = cluster_of(split)
    watching = asyncio.create_task(cluster._kill_the_silent())
    speaking = asyncio.create_task(answer(split, 10))
    await until(lambda: bool(speakers(split)), "somebody is speaking")
    os.kill(pid_of(speakers(split)[0]), signal.SIGSTOP)
    assert (await speaking).text == undisturbed
    watching.cancel()
    await everybody_up(split)
    await all_blocks_free(split)


async def test_a_worker_that_came_back_is_another_and_serves(split: DisaggBackend) -> None:
    await everybody_up(split)
    (victim,) = cluster_of(split).prefill
    assert victim.started is not None
    before = victim.started.incarnation
    os.kill(pid_of(victim), signal.SIGKILL)
    await until(lambda: not victim.up, "its loss is noticed")
    counted = cluster_of(split).pools.placed["fallback"]
    fallback = await ask(split, "What is the capital of France?")
    assert "Paris" in fallback.text and fallback.transfer is None, "whole, where it could be"
    # llm-d-router#1461: never in silence
    assert fallback.placement is not None and fallback.placement.endswith("a pool has nobody")
    assert cluster_of(split).pools.placed["fallback"] == counted + 1
    await everybody_up(split)
    assert victim.started.incarnation != before
    spoken = await ask(split, "What is the capital of France?")
    assert "Paris" in spoken.text and spoken.transfer is not None
    await all_blocks_free(split)


async def test_kv_of_an_answer_under_way_moves_to_host_memory_where_prompts_need_its_room(
    smollm2: ModelFiles,
) -> None:
    """sglang#31473: kept KV is no reason for a prompt to wait; and it is there when it is needed."""
    backend = await started(kv_tokens=1024, decode=2, disaggregate="always", prefix_cache=False, threads=1)
    try:
        undisturbed = [(await answer(backend, number)).text for number in range(4)]
        speaking = [asyncio.create_task(answer(backend, number)) for number in range(4)]  # 4 × 240 tokens
        cluster = cluster_of(backend)
        (prefill,), victim = cluster.prefill, cluster.decode[0]
        await until(lambda: all(len(one.tokens) > 2 for one in prefill.active.values()), "all prompts are computed")
        os.kill(pid_of(victim), signal.SIGKILL)
        assert [spoken.text for spoken in await asyncio.gather(*speaking)] == undisturbed
        await everybody_up(backend)
        await all_blocks_free(backend)
    finally:
        await backend.aclose()


async def test_an_answer_of_a_lone_worker_goes_on_when_it_is_back(smollm2: ModelFiles) -> None:
    backend = await started(mode="unified", kv_tokens=2048)
    try:
        undisturbed = (await answer(backend, 1)).text
        speaking = asyncio.create_task(answer(backend, 1))
        (worker,) = cluster_of(backend).workers
        await until(lambda: any(len(one.tokens) > 4 for one in worker.active.values()), "it is speaking")
        os.kill(pid_of(worker), signal.SIGKILL)
        await until(lambda: not worker.up, "its loss is noticed")
        with pytest.raises(BackendError, match="no worker is up") as refused:
            await ask(backend, "What is the capital of France?")
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        assert (await speaking).text == undisturbed
        await all_blocks_free(backend)
    finally:
        await backend.aclose()


async def test_a_request_that_kills_whoever_serves_it_is_given_up(
    smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await started(decode=2, threads=1, disaggregate="always")
    try:
        cluster = cluster_of(backend)
        speaking = asyncio.create_task(ask(backend, LONG * 3, max_tokens=50))
        killed = 0
        while not speaking.done():
            for worker in cluster.workers:
                if worker.up and worker.active and not any(one.tokens for one in worker.active.values()):
                    os.kill(pid_of(worker), signal.SIGKILL)
                    killed += 1
                    await until(lambda worker=worker: not worker.up or speaking.done(), "its loss is noticed")
            await asyncio.sleep(0.01)
        with pytest.raises(BackendError) as failed:
            await speaking
        assert failed.value.status == 503
        assert killed <= 5
        await everybody_up(backend)
        assert "Paris" in (await ask(backend, "What is the capital of France?")).text
    finally:
        await backend.aclose()
