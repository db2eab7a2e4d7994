"""Greedy output of split, unified and `transformers` is the same, token for token, on the same float32 weights."""

from __future__ import annotations

import asyncio

import pytest

from backends.disagg.cluster import Cluster
from backends.disagg.messages import Sampling
from backends.disagg.roster import Roster
from backends.models import ModelFiles, fingerprint, load_config
from backends.options import DisaggOptions
from tests.disagg.reference import BLOCK, LENGTHS, NEW_TOKENS, answers, prompts
from tests.disagg.serving import needs_nixl

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]


async def generate(files: ModelFiles, asked: list[list[int]], options: DisaggOptions) -> list[list[int]]:
    """Every prompt at once, on a cluster of its own."""
    cluster = Cluster(Roster(options, files, fingerprint(files), 4096).workers())
    await cluster.start(options.start_timeout_s)
    config = load_config(files)

    async def one(prompt: list[int]) -> list[int]:
        generation = cluster.submit(prompt, Sampling(NEW_TOKENS, 0.0, 1.0, 0, []))
        tokens = [out.token async for out in generation]
        if options.mode == "split":
            moved = generation.transfer
            assert moved is not None and moved.prefill_pid != moved.decode_pid
            blocks = -(-len(prompt) // BLOCK)
            assert moved.bytes == blocks * BLOCK * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        return tokens

    try:
        return list(await asyncio.gather(*(one(prompt) for prompt in asked)))
    finally:
        await cluster.aclose()


def test_there_are_at_least_twenty_prompts_with_block_boundaries() -> None:
    assert len(LENGTHS) >= 20
    assert {1, BLOCK - 1, BLOCK, BLOCK + 1, 2000} <= set(LENGTHS)


@pytest.mark.parametrize(
    ("mode", "transport"),
    [("split", "shm"), ("split", "tcp"), pytest.param("split", "nixl", marks=needs_nixl), ("unified", "shm")],
)
async def test_greedy_equals_transformers(smollm2: ModelFiles, mode: str, transport: str) -> None:
    options = DisaggOptions.model_validate(
        {"model": "smollm2-135m", "mode": mode, "transport": transport, "dtype": "float32", "block_size": BLOCK}
    )
    asked, expected = prompts(), await asyncio.to_thread(answers)
    if transport != "shm":  # the same engine behind another socket: half of the prompts will do
        asked, expected = asked[:-1:2], expected[:-1:2]
    got = await generate(smollm2, asked, options)
    different = [
        (len(prompt), next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b))
        for prompt, ours, theirs in zip(asked, got, expected, strict=True)
        if ours != theirs
    ]
    assert not different, f"(prompt length, first different token): {different}"
