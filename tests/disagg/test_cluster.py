"""The bundled cluster: real processes, the real model, and what happens when any of them dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from backends.base import BackendError, Call, Goals
from backends.disagg import lives
from backends.disagg.backend import DisaggBackend
from backends.disagg.cluster import Cluster
from backends.disagg.messages import Sampling, Submit
from backends.disagg.roster import Roster
from backends.models import ModelFiles, fingerprint, load_tokenizer
from backends.options import DisaggOptions
from tests.disagg.serving import LONG, all_blocks_free, ask, cluster_of, pid_of, started, until

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(smollm2: ModelFiles) -> AsyncIterator[DisaggBackend]:
    backend = await started()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unified(smollm2: ModelFiles) -> AsyncIterator[DisaggBackend]:
    backend = await started(mode="unified")
    yield backend
    await backend.aclose()


async def test_an_answer_is_prefilled_in_one_process_and_decoded_in_another(split: DisaggBackend) -> None:
    spoken = await ask(split, "What is the capital of France?")
    assert "Paris" in spoken.text
    moved = spoken.transfer
    assert moved is not None and moved.bytes > 0
    prefill, decode = cluster_of(split).workers
    assert (moved.prefill_pid, moved.decode_pid) == (pid_of(prefill), pid_of(decode))
    assert len({os.getpid(), moved.prefill_pid, moved.decode_pid}) == 3
    assert min(moved.queue_s, moved.alloc_s, moved.wire_s, moved.codec_s, moved.exposed_s) >= 0


@pytest.mark.parametrize("surface", ["chat.completions", "completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_split_and_unified_say_the_same(
    split: DisaggBackend, unified: DisaggBackend, surface: Any, stream: bool
) -> None:
    one = await ask(split, "The three largest rivers are", surface=surface, stream=stream)
    other = await ask(unified, "The three largest rivers are", surface=surface, stream=stream)
    assert one.text == other.text != ""
    assert (one.finish_reason, one.counts) == (other.finish_reason, other.counts)
    assert other.transfer is None


async def test_sixteen_at_once_get_what_one_alone_gets(split: DisaggBackend) -> None:
    prompts = [f"Name {n} things that are {what}." for n in (2, 3) for what in ("red", "old", "far", "wet")]
    prompts += [f"{LONG[: 120 * (index + 1)]} What is the number {index}?" for index in range(8)]
    alone = [(await ask(split, prompt, max_tokens=8)).text for prompt in prompts]
    together = await asyncio.gather(*(ask(split, prompt, max_tokens=8) for prompt in prompts))
    assert [spoken.text for spoken in together] == alone
    await all_blocks_free(split)


async def test_a_seed_gives_the_same_words_on_both_and_others_give_others(
    split: DisaggBackend, unified: DisaggBackend
) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 10}
    one = await ask(split, "Once upon a time", seed=7, **sampling)
    assert (await ask(split, "Once upon a time", seed=7, **sampling)).text == one.text
    assert (await ask(unified, "Once upon a time", seed=7, **sampling)).text == one.text
    texts = {(await ask(split, "Once upon a time", seed=seed, **sampling)).text for seed in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("mode", ["split", "unified"])
async def test_a_prompt_said_again_is_found_in_the_cache_and_answered_alike(
    request: pytest.FixtureRequest, mode: str
) -> None:
    backend = request.getfixturevalue(mode)
    prompt = f"The {mode} cluster is asked: {LONG[:900]} What is it?"
    first, again = await ask(backend, prompt), await ask(backend, prompt)
    assert first.usage.cached_tokens < 30, "the system prompt at most"
    assert again.usage.cached_tokens >= again.usage.prompt_tokens - 16
    assert again.text == first.text
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    await all_blocks_free(backend)


async def test_a_prefix_asked_for_by_many_at_once_is_computed_once(unified: DisaggBackend) -> None:
    prompts = [f"Asked by many: {LONG[:900]} What is number {index}?" for index in range(6)]
    spoken = await asyncio.gather(*(ask(unified, prompt, max_tokens=4) for prompt in prompts))
    computed = [one.usage.prompt_tokens - one.usage.cached_tokens for one in spoken]
    assert sum(count > 64 for count in computed) == 1, computed
    await all_blocks_free(unified)


async def test_weights_rounded_to_int8_still_know_the_capital_of_france(smollm2: ModelFiles) -> None:
    backend = await started(quantization="int8")
    try:
        spoken = await ask(backend, "What is the capital of France?")
        assert "Paris" in spoken.text and spoken.transfer is not None
    finally:
        await backend.aclose()


async def test_a_stop_string_ends_the_answer_before_it(split: DisaggBackend) -> None:
    whole = await ask(split, "Count from 1 to 9, with commas.", max_tokens=24)
    assert "," in whole.text
    cut = await ask(split, "Count from 1 to 9, with commas.", max_tokens=24, stop=[",", "never"])
    assert cut.text == whole.text.partition(",")[0]
    assert cut.finish_reason == "stop"
    await all_blocks_free(split)


async def test_limits_are_kept_and_named(split: DisaggBackend) -> None:
    one = await ask(split, "What is the capital of France?", max_tokens=1)
    assert (one.usage.completion_tokens, one.finish_reason) == (1, "length")
    assert one.transfer is None, "one token needs no decode worker"
    ended = await ask(split, "What is the capital of France?", max_tokens=100)
    assert ended.finish_reason == "stop"
    endless = await ask(split, "Write a long poem.", max_tokens=5)
    assert (endless.usage.completion_tokens, endless.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    "asked",
    [
        {"min_tokens": 12},
        {"ignore_eos": True},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "min_tokens": 12},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "min_p": 0.05},
    ],
    ids=lambda asked: ", ".join(asked),
)
async def test_what_steers_the_draw_is_the_same_on_both(
    split: DisaggBackend, unified: DisaggBackend, asked: dict[str, Any]
) -> None:
    """vllm#16705: the first token comes from the prefill side, and what is asked holds there too."""
    one = await ask(split, "What is the capital of France?", max_tokens=14, **asked)
    other = await ask(unified, "What is the capital of France?", max_tokens=14, **asked)
    assert (one.text, one.counts) == (other.text, other.counts)
    if "min_tokens" in asked:
        assert one.usage.completion_tokens >= 12
    if "ignore_eos" in asked:
        assert one.usage.completion_tokens == 14


async def test_biases_and_stop_ids_are_heeded(split: DisaggBackend) -> None:
    tokenizer = split._tokenizer
    assert tokenizer is not None
    (paris,) = tokenizer.encode(" Paris")
    plain = await ask(split, "What is the capital of France?")
    assert " Paris" in plain.text
    assert " Paris" not in (await ask(split, "What is the capital of France?", logit_bias={str(paris): -100})).text
    stopped = await ask(split, "What is the capital of France?", stop_token_ids=[paris])
    assert stopped.text == plain.text.partition(" Paris")[0]
    assert stopped.finish_reason == "stop"
    with pytest.raises(BackendError, match="outside the vocabulary of 49152") as refused:
        await ask(split, "hi", logit_bias={"49152": 1})
    assert refused.value.param == "logit_bias"


async def test_no_max_tokens_works(unified: DisaggBackend) -> None:
    """production-stack#747"""
    assert (await ask(unified, "What is the capital of France?", max_tokens=None)).finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text parts"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, "tools", "knows no tools"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 3}, "temperature", "from 0 to 2"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages", "maximum context length is 8192"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9000}, "messages", "maximum context length"),
    ],
)
async def test_a_wrong_request_is_refused_before_any_work(
    split: DisaggBackend, body: dict[str, Any], param: str, said: str
) -> None:
    """sglang#30233"""
    with pytest.raises(BackendError) as refused:
        await split.open(Call("r", "chat.completions", body, stream=True))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert said in refused.value.message


async def test_a_client_that_leaves_frees_everything_and_lets_others_on(split: DisaggBackend) -> None:
    """dynamo#13691, vllm#25067, sglang#9817: at any moment of a request's life."""
    for delay in (0.0, 0.02, 0.1, 0.3, 1.0, 2.5):
        leaving = asyncio.create_task(ask(split, f"{delay} {LONG}", max_tokens=100))
        await asyncio.sleep(delay)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert "Paris" in (await ask(split, "What is the capital of France?")).text
    await all_blocks_free(split)


async def test_more_requests_than_memory_all_get_their_answers(smollm2: ModelFiles) -> None:
    """vllm#30659, sglang#31473, sglang#30033: no deadlock where prompts and answers exceed both pools."""
    backend = await started(kv_tokens=512, max_batch=4)
    try:
        prompts = [f"{index}: {LONG[:500]}" for index in range(5)]  # about 160 tokens each
        spoken = await asyncio.gather(*(ask(backend, prompt, max_tokens=40) for prompt in prompts))
        assert all(one.usage.completion_tokens > 0 for one in spoken)
        alone = await ask(backend, prompts[3], max_tokens=40)
        assert spoken[3].text == alone.text, "swapping KV out and in changes nothing (vllm#25815)"
        await all_blocks_free(backend)
    finally:
        await backend.aclose()


async def test_kv_that_nobody_takes_is_freed_when_its_lease_ends(smollm2: ModelFiles) -> None:
    """vllm#46283, vllm#58222, sglang#39428"""
    options = DisaggOptions(model="smollm2-135m", kv_tokens=2048)
    workers = Roster(options, smollm2, fingerprint(smollm2), 2048).workers()
    workers[0].config = msgspec.structs.replace(workers[0].config, lease_s=3.0)
    cluster = Cluster(workers)
    await cluster.start(options.start_timeout_s)
    try:
        (worker,) = cluster.prefill
        ids = load_tokenizer(smollm2).encode(LONG)[:60]
        for request in (1, 2):
            worker.send(Submit(request, ids, Sampling(8, 0.0, 1.0, 0, []), hand_over=True))
        await until(lambda: worker.state is not None and worker.state.held == 2, "both prompts' KV is held")
        await until(lambda: worker.state is not None and worker.state.free_blocks == 128, "both leases have ended")
        assert worker.state is not None and worker.state.held == 0
    finally:
        await cluster.aclose()


@pytest.mark.parametrize("small", ["prefill", "decode"])
async def test_what_one_side_refuses_is_refused_with_its_status_and_freed_on_the_other_at_once(
    smollm2: ModelFiles, small: str
) -> None:
    """vllm#41269, sglang#9726, vllm-ascend#12166: a prompt that fits one side's memory and not the other's."""
    options = DisaggOptions(model="smollm2-135m", kv_tokens=2048, threads=1)
    cluster = Cluster(Roster(options, smollm2, fingerprint(smollm2), 2048).workers())
    for worker in cluster.workers:
        if worker.role == small:
            worker.config = msgspec.structs.replace(worker.config, kv_tokens=128)
    await cluster.start(options.start_timeout_s)
    try:
        generation = cluster.submit(list(range(100, 600)), Sampling(8, 0.0, 1.0, 0, []))
        with pytest.raises(
            BackendError, match="a prompt of 500 tokens needs 32 KV blocks; the worker has 8"
        ) as refused:
            async for _ in generation:
                pass
        assert refused.value.status == 400
        cluster.end(generation)
        for worker in cluster.workers:
            await until(
                lambda worker=worker: (
                    worker.state is not None
                    and worker.started is not None
                    and worker.state.free_blocks == worker.started.num_blocks
                ),
                "its blocks are free, long before any lease ends",
                timeout_s=10,
            )
            assert not worker.active
    finally:
        await cluster.aclose()


async def test_a_prompt_is_templated_and_tokenized_once_and_its_ids_are_passed_on(
    split: DisaggBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#39756"""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 5}
    counted = split.count_prompt("chat.completions", body)
    assert counted is not None and counted.prompt_ids is not None
    monkeypatch.setattr(split, "_encode_chat", lambda *_: pytest.fail("tokenized again"))
    reply = await split.open(Call("r", "chat.completions", body, stream=False, prompt_ids=counted.prompt_ids))
    pieces = [piece async for piece in reply]
    assert pieces[-1].usage is not None and pieces[-1].usage.prompt_tokens == counted.tokens


@pytest.mark.parametrize("mode", ["split", "unified"])
async def test_a_cluster_foresees_what_it_has_cached_and_how_long_it_will_take(
    mode: str, split: DisaggBackend, unified: DisaggBackend
) -> None:
    backend = split if mode == "split" else unified
    words = f"In the {mode} harbour boats of many colours lay side by side. " * 30
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4}
    counted = backend.count_prompt("chat.completions", body)
    assert counted is not None
    first = backend.forecast(counted, 4, Goals())
    assert first is not None and first.uncached_tokens > counted.tokens - 64
    assert 0 < first.tpot_s < first.ttft_s < 30
    reply = await backend.open(Call("r", "chat.completions", body, stream=False, prompt_ids=counted.prompt_ids))
    assert [piece async for piece in reply]
    await until(lambda: backend.forecast(counted, 4, Goals()).uncached_tokens < 64, "the prompt is cached")
    again = backend.forecast(counted, 4, Goals())
    assert again is not None and again.ttft_s < first.ttft_s


async def test_closing_leaves_no_process(smollm2: ModelFiles) -> None:
    backend = await started(mode="unified", kv_tokens=512)
    pids = [pid_of(worker) for worker in cluster_of(backend).workers]
    asking = asyncio.create_task(ask(backend, "Write a long poem.", max_tokens=200))
    await asyncio.sleep(0.5)
    await backend.aclose()
    with pytest.raises(BackendError, match="stopping"):
        await asking
    assert not any(psutil.pid_exists(pid) for pid in pids)
    await backend.aclose()
    with pytest.raises(BackendError, match="is not running"):
        await ask(backend, "hi")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "smollm2-135"}, "did you mean 'smollm2-135m'"),
        ({"model": "./nowhere"}, "no such file or folder"),
        ({"max_model_len": 100_000}, "more than the 8192 tokens"),
        ({"device": "cuda:7"}, "could not start"),
        ({"start_timeout_s": 0.05}, "not ready within 0.05 s"),
    ],
)
async def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(options: dict[str, Any], said: str) -> None:
    before = children()
    with pytest.raises(BackendError) as refused:
        await started(**options)
    assert said in refused.value.message
    assert refused.value.hint
    assert children() == before


async def test_a_worker_that_dies_while_it_starts_is_named(
    smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setattr(lives.sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match=r"(prefill|decode)-0 died while it started \(exit status 1\)"):
        await started()
    assert children() == before


def children() -> set[int]:
    """This process's workers."""
    return {
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "backends.disagg.process" in child.cmdline()
    }


@pytest.mark.parametrize("codec", ["lossless", "near"])
async def test_kv_goes_over_the_network_smaller_and_the_answer_is_as_good(
    smollm2: ModelFiles, unified: DisaggBackend, codec: str
) -> None:
    backend = await started(transport="tcp", kv_codec=codec, disaggregate="always")
    try:
        spoken = await ask(backend, f"{LONG} What is the capital of France?")
        assert spoken.transfer is not None
        assert (spoken.transfer.transport, spoken.transfer.codec) == ("tcp", codec)
        if codec == "lossless":
            assert spoken.text == (await ask(unified, f"{LONG} What is the capital of France?")).text
        assert "Paris" in (await ask(backend, "What is the capital of France?")).text
        await all_blocks_free(backend)
    finally:
        await backend.aclose()
