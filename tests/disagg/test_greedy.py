"""Greedy output of split, unified and `transformers` is the same, token for token, on the same float32 weights."""

from __future__ import annotations

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from backends.disagg.backend import worker_configs
from backends.disagg.cluster import Cluster
from backends.disagg.messages import Sampling
from backends.models import ModelFiles, fingerprint, load_config, load_tokenizer
from backends.options import DisaggOptions

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 16
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1024, 2000]
"""Prompts of one token to two thousand: on each side of block (16) and chunk (512) boundaries."""
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def prompts(smollm2: ModelFiles) -> list[list[int]]:
    """Real text, each prompt from another place of it."""
    text = (Path(__file__).parents[2] / "router/cli/data/two-kitchens.txt").read_text() * 2
    ids = load_tokenizer(smollm2).encode(text)
    return [ids[37 * index : 37 * index + length] for index, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference(smollm2: ModelFiles, prompts: list[list[int]]) -> list[list[int]]:
    """What `transformers`, reading the same GGUF file with its own code, generates; in two processes, to be quick."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        halves = pool.map(transformers_generate, [smollm2.path] * 2, [prompts[::2], prompts[1::2]])
        even, odd = halves
    return [answer for pair in zip(even, odd, strict=True) for answer in pair]


def transformers_generate(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # the workers get no end token either: 64 tokens each
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


async def generate(files: ModelFiles, prompts: list[list[int]], options: DisaggOptions) -> list[list[int]]:
    """Every prompt at once, on a cluster of its own."""
    cluster = Cluster(*worker_configs(options, files, fingerprint(files), 4096))
    await cluster.start(options.start_timeout_s)

    async def one(prompt: list[int]) -> list[int]:
        generation = cluster.submit(prompt, Sampling(NEW_TOKENS, 0.0, 1.0, 0, []))
        tokens = [out.token async for out in generation]
        if options.mode == "split":
            moved = generation.transfer
            assert moved is not None and moved.prefill_pid != moved.decode_pid
            blocks = -(-len(prompt) // BLOCK)
            config = load_config(files)
            assert moved.bytes == blocks * BLOCK * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        return tokens

    try:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    finally:
        await cluster.aclose()


def test_there_are_at_least_twenty_prompts_with_block_boundaries() -> None:
    assert len(LENGTHS) >= 20
    assert {1, BLOCK - 1, BLOCK, BLOCK + 1, 2000} <= set(LENGTHS)


@pytest.mark.parametrize(
    ("mode", "transport"), [("split", "shm"), ("split", "tcp"), ("unified", "shm")], ids=lambda value: str(value)
)
async def test_greedy_equals_transformers(
    smollm2: ModelFiles, prompts: list[list[int]], reference: list[list[int]], mode: str, transport: str
) -> None:
    options = DisaggOptions.model_validate(
        {"model": "smollm2-135m", "mode": mode, "transport": transport, "dtype": "float32", "block_size": BLOCK}
    )
    if transport == "tcp":  # the same engine behind another socket: half of the prompts will do
        prompts, reference = prompts[:18:2], reference[:18:2]
    answers = await generate(smollm2, prompts, options)
    different = [
        (len(prompt), next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b))
        for prompt, ours, theirs in zip(prompts, answers, reference, strict=True)
        if ours != theirs
    ]
    assert not different, f"(prompt length, first different token): {different}"
