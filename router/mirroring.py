"""Copies of requests for a target that is being tried out. Nobody waits for them, and nobody sees what they answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from backends.base import BackendError, Call, Goals, Usage
from backends.dialects import open_call

if TYPE_CHECKING:
    from router.execution import Executor
    from router.incoming import Incoming

MOST_AT_ONCE = 16
"""Copies under way at one target; more are left out, so that a slow one cannot pile them up."""


class Mirrors:
    """What the target does with its copies is observed like any other answer, and counted apart from requests."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._under_way: dict[str, set[asyncio.Task[None]]] = {}

    def send(self, target: str, incoming: Incoming) -> None:
        """Send a copy of `incoming`; returns at once."""
        tasks = self._under_way.setdefault(target, set())
        if len(tasks) >= MOST_AT_ONCE:
            self._count(target, "left_out")
            return
        task = asyncio.create_task(self._copy(target, incoming))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def aclose(self) -> None:
        """Cancel what is under way."""
        tasks = [task for tasks in self._under_way.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, name: str, incoming: Incoming) -> None:
        executor = self._executor
        target, known = executor.policy.targets[name], executor.state[name]
        load, outcome = known.begin(), "failed"
        try:
            async with asyncio.timeout(executor.policy.resilience_of(incoming.model).deadline_ms / 1000):
                call = Call(
                    request_id=f"{incoming.request_id}-mirror",
                    surface=incoming.surface,
                    body={**incoming.body, "model": target.model},
                    stream=incoming.stream,
                    goals=Goals(incoming.goals.ttft_ms, incoming.goals.tpot_ms),
                )
                begun = time.monotonic()
                first_s, last_s, usage = await self._read(target.provider, call, begun)
            outcome = "answered"
            if incoming.stream and usage is not None:
                more = usage.completion_tokens - 1
                known.observe(usage.prompt_tokens, first_s, (last_s - first_s) / more if more > 0 else None, load)
        except (BackendError, TimeoutError):
            pass
        finally:
            known.end()
            self._count(name, outcome)

    async def _read(self, provider: str, call: Call, begun: float) -> tuple[float, float, Usage | None]:
        """Seconds to the first and to the last content, and the usage."""
        first_s = last_s = None
        usage = None
        reply = await open_call(self._executor.backends[provider], call)
        try:
            async for piece in reply:
                usage = piece.usage or usage
                if piece.content:
                    last_s = time.monotonic() - begun
                    first_s = last_s if first_s is None else first_s
        finally:
            await reply.aclose()
        if first_s is None or last_s is None:
            raise BackendError("the answer ended before it began", status=502, code="stream_cut")
        return first_s, last_s, usage

    def _count(self, target: str, outcome: str) -> None:
        self._executor.ledger.metrics.mirrored.of(target, outcome).inc()
