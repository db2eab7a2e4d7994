"""Clusters for the hand-over benchmarks, and what is asked of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from backends.base import Goals
from backends.disagg.cluster import NO_GOALS, Cluster
from backends.disagg.generation import Generation
from backends.disagg.messages import Sampling
from backends.disagg.roster import Roster
from backends.models import fingerprint, load_config, load_tokenizer, resolve
from backends.options import DisaggOptions


@contextlib.asynccontextmanager
async def running(
    options: DisaggOptions, prepare: Callable[[Cluster], None] = lambda _: None
) -> AsyncIterator[Cluster]:
    """A started cluster; `prepare` may change its workers before they start."""
    files = resolve(options.model, pull_missing=True)
    context = min(load_config(files).max_position_embeddings, options.kv_tokens)
    adaptive = options.disaggregate == "adaptive"
    cluster = Cluster(Roster(options, files, fingerprint(files), context).workers(), adaptive=adaptive)
    prepare(cluster)
    await cluster.start(options.start_timeout_s)
    try:
        yield cluster
    finally:
        await cluster.aclose()


def options(model: str, **changes: Any) -> DisaggOptions:
    return DisaggOptions.model_validate({"model": model, "pin": True, "disaggregate": "always", **changes})


def greedy(max_tokens: int) -> Sampling:
    """Never ended by the model: every answer has its full length."""
    return Sampling(max_tokens=max_tokens, temperature=0.0, top_p=1.0, seed=0, stop_ids=[])


class Prompts:
    """Made-up prompts, the same ones in every run: none shares a prefix with another."""

    def __init__(self, model: str, seed: int = 0) -> None:
        tokenizer = load_tokenizer(resolve(model, pull_missing=True))
        self._vocabulary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.eos_token_ids]
        self._random = random.Random(seed)

    def next(self, tokens: int) -> list[int]:
        return self._random.choices(self._vocabulary, k=tokens)


@contextlib.contextmanager
def asking(cluster: Cluster, prompt: Sequence[int], max_tokens: int, goals: Goals = NO_GOALS) -> Any:
    """A request under way; ended, however the block is left."""
    generation: Generation = cluster.submit(list(prompt), greedy(max_tokens), goals)
    try:
        yield generation
    finally:
        cluster.end(generation)
