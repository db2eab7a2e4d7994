"""One attempt at one target: opened, read to its first content, and then the source of the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from backends.base import BackendError, Call, Goals, Piece, PromptCount, Reply, Usage
from backends.dialects import open_call
from policies import Forecast, Target
from router.results import Attempt, AttemptKind

if TYPE_CHECKING:
    from router.execution import Executor
    from router.incoming import Incoming

_HEDGED_AWAY = 499
_MOST_HELD = 64 << 20


class Tried:
    """Open it once; afterwards it is either the winner or has released everything."""

    def __init__(
        self, executor: Executor, incoming: Incoming, target: Target, kind: AttemptKind, counted: PromptCount | None
    ) -> None:
        self.target = target
        self.kind: AttemptKind = kind
        self.known = executor.state[target.name]
        self.usage: Usage | None = None
        self.held: list[Piece] = []
        """What arrived before the commit point: nothing, comments or role-only frames, and the first content."""
        self.pieces: AsyncIterator[Piece] | None = None
        self.reply: Reply | None = None
        self.first_at = self.last_at = 0.0
        self.load = 0
        """What was under way there when it began."""
        self.forecast: Forecast | None = None
        self.uncached_tokens = 0
        self.begun = time.monotonic()
        self._ended = False
        self._executor = executor
        self.incoming = incoming
        self._counted = counted
        self._probes = (False, False)

    def cost_usd(self, usage: Usage | None = None) -> float | None:
        """By the policy's price; None where that or the usage is not known."""
        price, used = self.target.price, usage or self.usage
        return None if price is None or used is None else price.of(used.prompt_tokens, used.completion_tokens)

    async def open(self, deadline: float, *, whole: bool = False) -> None:
        """Read up to the first content; `whole`: up to the end. Raises BackendError, with nothing left under way."""
        resilience = self._executor.policy.resilience_of(self.incoming.model)
        self.begun = now = time.monotonic()
        until, what = deadline, f"no complete answer within the deadline of {resilience.deadline_ms} ms"
        timer_ms = resilience.attempt_timeout_ms
        if timer_ms is not None and now + timer_ms / 1000 < until:
            until, what = now + timer_ms / 1000, f"no answer within attempt_timeout_ms ({timer_ms} ms)"
        whole_by = until
        first_by = now + resilience.ttft_timeout_ms / 1000
        if self.incoming.stream and first_by < until:
            until, what = first_by, f"no content within ttft_timeout_ms ({resilience.ttft_timeout_ms} ms)"
        self.load = self.known.begin()
        self._probes = self.known.goes(now)
        try:
            # The timer runs over everything up to the first content: headers, comments and role-only frames
            # do not satisfy it (litellm#5859, livekit/agents#6171).
            async with asyncio.timeout(until - now):
                self.reply = await open_call(self._executor.backends[self.target.provider], self._call())
                self.pieces = aiter(self.reply)
                await self._read_to_content()
            self.first_at = self.last_at = time.monotonic()
            if whole:
                await self._read_to_end(resilience.idle_timeout_ms, whole_by)
        except TimeoutError:
            error = BackendError(f"{self.target.name}: {what}", status=504, code="timeout")
            await self.failed(error)
            raise error from None
        except BackendError as error:
            await self.failed(error)
            raise
        except BaseException:
            await self.aclose()
            raise

    def _call(self) -> Call:
        incoming = self.incoming
        connect_ms = self._executor.policy.resilience_of(incoming.model).connect_timeout_ms
        return Call(
            request_id=incoming.request_id,
            surface=incoming.surface,
            body={**incoming.body, "model": self.target.model},
            stream=incoming.stream,
            goals=Goals(incoming.goals.ttft_ms, incoming.goals.tpot_ms),
            prompt_ids=None if self._counted is None else self._counted.prompt_ids,
            raw=incoming.raw,
            dropped=incoming.dropped,
            connect_timeout_s=None if connect_ms is None else connect_ms / 1000,
        )

    async def _read_to_content(self) -> None:
        assert self.pieces is not None
        async for piece in self.pieces:
            self.held.append(piece)
            self.usage = piece.usage or self.usage
            if piece.content or piece.done:
                return
        raise BackendError("the answer ended before it began", status=502, code="stream_cut")

    async def _read_to_end(self, idle_ms: int, deadline: float) -> None:
        """With `after_commit: restart` nothing is shown before all of it is there."""
        size = sum(len(piece.data) for piece in self.held)
        while not self.held[-1].done:
            piece = await self.next_piece(self.last_at + idle_ms / 1000, deadline, idle_ms)
            if piece.content or piece.done:
                self.last_at = time.monotonic()
            self.held.append(piece)
            size += len(piece.data)
            if size > _MOST_HELD:
                raise BackendError(f"{self.target.name}: the answer is larger than 64 MiB", status=502)

    async def next_piece(self, idle_at: float, deadline: float, idle_ms: int) -> Piece:
        """Raises BackendError where the stream is cut, or silent for too long."""
        assert self.pieces is not None
        try:
            async with asyncio.timeout(min(idle_at, deadline) - time.monotonic()):
                piece = await anext(self.pieces)
        except StopAsyncIteration:
            raise BackendError(f"{self.target.name}: the stream was cut", status=502, code="stream_cut") from None
        except TimeoutError:
            late = f"silent for idle_timeout_ms ({idle_ms} ms)" if idle_at < deadline else "not finished in time"
            raise BackendError(f"{self.target.name}: the stream was {late}", status=504, code="timeout") from None
        self.usage = piece.usage or self.usage
        return piece

    # --- how it ended --------------------------------------------------------------------------------

    async def failed(self, error: BackendError) -> None:
        """Tell the target's breakers, and release everything."""
        if not self._ended:
            now = time.monotonic()
            self.known.went(now, self._probes, error.status, error.message, error.retry_after_s, self.begun)
        await self._release()

    async def answered(self) -> None:
        """It is whole."""
        if not self._ended:
            self.known.went(time.monotonic(), self._probes, 200)
        await self._release()

    async def aclose(self) -> None:
        """Given up for no fault of its own; work upstream is cancelled."""
        if not self._ended:
            self.known.given_up(self._probes)
        await self._release()

    async def _release(self) -> None:
        if self._ended:
            return
        self._ended = True
        self.known.end()
        self._executor.freed(self.target.name, time.monotonic() - self.begun)
        if self.reply is not None:
            await self.reply.aclose()

    def attempt(self, status: int = 200, error: str | None = None) -> Attempt:
        """For the record. One that was hedged away was read as far as its prompt."""
        usage = self.usage
        if status == _HEDGED_AWAY and usage is None:
            usage = Usage(self.uncached_tokens, 0)
        ttft_s = self.first_at - self.begun if self.first_at else None
        return Attempt(
            target=self.target.name,
            status=status,
            seconds=(self.first_at or time.monotonic()) - self.begun,
            error=error,
            kind=self.kind,
            ttft_s=ttft_s,
            usage=usage,
            cost_usd=self.cost_usd(usage),
        )
