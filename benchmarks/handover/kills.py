"""Workers killed at random under load: what the clients see, what is computed twice, and what is left behind.

Every answer is compared, token by token, with the same request's undisturbed one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from backends.disagg.cluster import Cluster
from backends.disagg.handle import WorkerHandle
from benchmarks.handover.clusters import Prompts, asking, options, running
from benchmarks.report import percentile, progress

CLIENTS = 6
PROMPTS = 12
PROMPT_TOKENS = (60, 700)
ANSWER = 96


@dataclass
class Seen:
    """What the clients saw."""

    answers: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    aborted: int = 0
    prompt_tokens: int = 0
    """Of every prompt that was sent."""
    pauses_s: list[float] = field(default_factory=list)
    """From a kill to the next token of each stream that was being decoded by the victim."""


class Load:
    """Clients that ask one request after another until told to stop."""

    def __init__(self, cluster: Cluster, model: str, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        prompts = Prompts(model, seed)
        self.prompts = [prompts.next(self.random.randint(*PROMPT_TOKENS)) for _ in range(PROMPTS)]
        self.undisturbed: list[list[int]] = []
        self.seen = Seen()
        self.stopping = False
        self.last_token: dict[int, float] = {}
        """When each request under way got its newest token."""

    async def listen(self) -> None:
        """Each prompt's answer while nothing happens."""
        for prompt in self.prompts:
            with asking(self.cluster, prompt, ANSWER) as generation:
                async for _ in generation:
                    pass
                self.undisturbed.append(generation.tokens)

    async def client(self, abort_share: float) -> None:
        while not self.stopping:
            index = self.random.randrange(PROMPTS)
            until = self.random.randrange(ANSWER) if self.random.random() < abort_share else None
            await self.ask(index, until)

    async def ask(self, index: int, until: int | None) -> None:
        """One request; given up after `until` tokens, where that is a number."""
        seen = self.seen
        try:
            with asking(self.cluster, self.prompts[index], ANSWER) as generation:
                seen.prompt_tokens += len(self.prompts[index])
                if until == 0:
                    await asyncio.sleep(self.random.random() / 2)
                    seen.aborted += 1
                    return
                async for _ in generation:
                    self.last_token[id(generation)] = time.perf_counter()
                    if len(generation.tokens) == until:
                        seen.aborted += 1
                        return
        except Exception as error:
            seen.failed.append(str(error))
            await asyncio.sleep(0.2)
            return
        seen.answers += 1
        seen.wrong += generation.tokens != self.undisturbed[index]

    async def kill(self, victims: list[WorkerHandle]) -> None:
        """Kill one of `victims` when all workers are up and some time has passed; note the pauses."""
        while not all(worker.up for worker in self.cluster.workers):  # noqa: ASYNC110 - a benchmark may poll
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.random.uniform(0.1, 0.8))
        victim = self.random.choice(victims)
        life = victim.started
        assert life is not None
        speaking = [one for one in victim.active.values() if one.serving is victim and one.tokens]
        os.kill(life.pid, signal.SIGKILL)
        killed = time.perf_counter()
        await asyncio.gather(*(self._pause(one, killed) for one in speaking))
        while victim.started is life:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def _pause(self, generation: Any, killed: float) -> None:
        before = len(generation.tokens)
        while not generation.finished and len(generation.tokens) <= before:
            await asyncio.sleep(0.002)
            before = before if time.perf_counter() - killed > 0.01 else len(generation.tokens)  # those in the pipe
        if len(generation.tokens) > before:
            self.seen.pauses_s.append(time.perf_counter() - killed)


async def under_kills(model: str, role: str, kills: int, abort_share: float, seed: int, name: str) -> dict[str, Any]:
    chosen = options(model, decode=2, threads=1, pin=False, prefix_cache=False, kv_tokens=8192)
    async with running(chosen) as cluster:
        load = Load(cluster, model, seed)
        await load.listen()
        await idle(cluster)
        before = resources(cluster)
        prefilled = sum(worker.prefilled_tokens for worker in cluster.workers)
        clients = [asyncio.create_task(load.client(abort_share)) for _ in range(CLIENTS)]
        for _ in progress(range(kills), name):
            pool = {"decode": cluster.decode, "prefill": cluster.prefill, "any": cluster.workers}[role]
            await load.kill(pool)
        load.stopping = True
        await asyncio.gather(*clients)
        left = await idle(cluster)
        seen = load.seen
        prefilled = sum(worker.prefilled_tokens for worker in cluster.workers) - prefilled
        after = resources(cluster)
        pauses = seen.pauses_s or [0.0]
        return {
            "kills": kills,
            "answers": seen.answers,
            "different_from_undisturbed": seen.wrong,
            "failed": len(seen.failed),
            "failures": sorted(set(seen.failed))[:5],
            "aborted": seen.aborted,
            "interrupted_streams": len(seen.pauses_s),
            "pause_p50_ms": round(percentile(pauses, 0.5) * 1000, 1),
            "pause_p95_ms": round(percentile(pauses, 0.95) * 1000, 1),
            "pause_max_ms": round(max(pauses) * 1000, 1),
            "prompt_tokens_sent": seen.prompt_tokens,
            "prompt_tokens_prefilled": prefilled,
            "left_behind": {**left, "more_than_before": {key: after[key] - before[key] for key in before}},
        }


async def idle(cluster: Cluster) -> dict[str, int]:
    """Wait until nothing is served; what is still held then, in all workers together."""

    def held() -> dict[str, int]:
        states = [(worker.started, worker.state) for worker in cluster.workers]
        return {
            "blocks": sum(up.num_blocks - state.free_blocks for up, state in states if up and state),
            "leases": sum(state.held for _, state in states if state),
            "requests": sum(len(worker.active) for worker in cluster.workers),
        }

    for _ in range(200):
        await asyncio.sleep(0.05)
        if all(worker.up and worker.state for worker in cluster.workers) and not any(held().values()):
            await asyncio.sleep(0.5)
            if not any(held().values()):
                break
    return held()


def resources(cluster: Cluster) -> dict[str, int]:
    """File descriptors, sockets and shared segments of the coordinator and all workers, and their number."""
    mine = psutil.Process()
    pids = [worker.started.pid for worker in cluster.workers if worker.started]
    processes = [mine, *(psutil.Process(pid) for pid in pids)]
    targets = [
        os.readlink(link)
        for process in processes
        for link in Path(f"/proc/{process.pid}/fd").iterdir()
        if os.path.lexists(link)
    ]
    workers = [child for child in mine.children() if "backends.disagg.process" in " ".join(child.cmdline())]
    return {
        "file_descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "segments": sum("splitroute-kv" in target for target in targets),
        "processes": len(workers),
    }


def run(model: str, quick: bool) -> dict[str, Any]:
    kills = 4 if quick else 50
    return {
        "decode_workers": asyncio.run(under_kills(model, "decode", kills, 0.0, 1, "killing decode workers")),
        "prefill_workers": asyncio.run(under_kills(model, "prefill", kills, 0.0, 2, "killing prefill workers")),
        "mixed": asyncio.run(under_kills(model, "any", kills, 0.4, 3, "killing anybody, clients leaving")),
    }
