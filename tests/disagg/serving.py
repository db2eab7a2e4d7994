"""Helpers of the tests that run real clusters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from backends.base import Call, KVTransfer, Surface, Usage
from backends.disagg.backend import DisaggBackend
from backends.disagg.cluster import Cluster
from backends.disagg.handle import WorkerHandle
from backends.disagg.transfer.nixl import installed
from backends.options import DisaggOptions

needs_nixl = pytest.mark.skipif(installed() is None, reason="NIXL is not installed: pip install 'splitroute[nixl]'")

LONG = "Tell me what this says. " + "The river runs past the old mill and down to the sea. " * 80
"""About a thousand tokens."""


async def started(**options: Any) -> DisaggBackend:
    """A running cluster of the real model; close it."""
    backend = DisaggBackend(
        "own", DisaggOptions.model_validate({"model": "smollm2-135m", "kv_tokens": 8192, **options})
    )
    await backend.start()
    return backend


def cluster_of(backend: DisaggBackend) -> Cluster:
    assert backend._cluster is not None
    return backend._cluster


def pid_of(worker: WorkerHandle) -> int:
    assert worker.started is not None
    return worker.started.pid


async def all_blocks_free(backend: DisaggBackend) -> None:
    """Every block of every worker comes back to its pool."""

    def free() -> bool:
        return all(
            worker.started is not None
            and worker.state is not None
            and worker.state.free_blocks == worker.started.num_blocks
            for worker in cluster_of(backend).workers
        )

    await until(free, "every KV block is free")


@dataclass(frozen=True, slots=True)
class Spoken:
    text: str
    finish_reason: str
    usage: Usage
    transfer: KVTransfer | None
    placement: str | None

    @property
    def counts(self) -> tuple[int, int]:
        """Prompt and completion tokens: what does not depend on what a worker happens to remember."""
        return self.usage.prompt_tokens, self.usage.completion_tokens


async def ask(
    backend: DisaggBackend,
    content: str,
    *,
    surface: Surface = "chat.completions",
    stream: bool = True,
    **parameters: Any,
) -> Spoken:
    """One greedy request, unless `parameters` say otherwise."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": content}]} if surface == "chat.completions" else {"prompt": content}
    )
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, **prompt, **parameters}
    reply = await backend.open(Call("test", surface, body, stream))
    pieces = [piece async for piece in reply]
    assert pieces[-1].done
    text, finish_reason = read(b"".join(piece.data for piece in pieces), stream)
    usage = pieces[-1].usage
    assert usage is not None
    return Spoken(text, finish_reason, usage, reply.transfer, reply.placement)


def read(data: bytes, stream: bool) -> tuple[str, str]:
    """(text, finish reason) of an answer in OpenAI's wire format."""
    if not stream:
        (choice,) = json.loads(data)["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]
    text, finish_reason = "", ""
    for line in data.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            finish_reason = choice["finish_reason"] or finish_reason
    return text, finish_reason


async def until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition that another process brings about."""
    for _ in range(round(timeout_s / 0.05)):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")
