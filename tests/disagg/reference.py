"""What `transformers` generates, reading the same GGUF file with its own code: what our greedy output must equal.

It takes minutes of one core, so it begins when the session does, in a process of low priority that uses what
other tests leave of the machine.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from backends.models import load_tokenizer, resolve

BLOCK = 16
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 2000]
"""Prompts of one token to two thousand: on each side of block (16) and chunk (512) boundaries."""
NEW_TOKENS = 64


def prompts() -> list[list[int]]:
    """Real text, each prompt from another place of it."""
    text = (Path(__file__).parents[2] / "router/cli/data/two-kitchens.txt").read_text() * 2
    ids = load_tokenizer(resolve("smollm2-135m", pull_missing=True)).encode(text)
    return [ids[37 * index : 37 * index + length] for index, length in enumerate(LENGTHS)]


@cache
def start() -> Connection:
    """Begin, once; the end of a pipe on which the answers will come. The process ends with this one."""
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    context.Process(target=_generate, args=(sending,), daemon=True).start()
    sending.close()
    return receiving


@cache
def answers() -> list[list[int]]:
    """The reference's tokens for each prompt; waits for them. Raises EOFError where it failed (its stderr says why)."""
    generated: list[list[int]] = start().recv()
    return generated


def _generate(sending: Connection) -> None:
    os.environ["TQDM_DISABLE"] = "1"  # its progress bars would run through pytest's own
    import tqdm

    # Its default lock is a named semaphore, which tests that look for what a server leaves behind would find.
    tqdm.tqdm.set_lock(threading.RLock())
    import torch
    from transformers import AutoModelForCausalLM

    os.nice(19)
    torch.set_num_threads(1)
    path = resolve("smollm2-135m", pull_missing=True).path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # the workers get no end token either: 64 tokens each
    generated = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        generated.append(out[0, len(prompt) :].tolist())
    sending.send(generated)
