"""One request under way: attempts inside one deadline until content can go to the client, and the rest relayed.

Before the first content (the commit point) a failure moves on to the next candidate, invisibly. After it the
answer cannot be replaced: it ends with an error, never as if it were whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from backends.base import BackendError, Call, Goals, KVTransfer, Piece, PromptCount, Reply, Usage
from backends.dialects import open_call
from policies import Forecast, Profile, Target
from router.errors import RouterError
from router.incoming import Incoming
from router.ledger import Record
from router.results import Attempt
from router.retrying import is_final, is_final_here, wait_s

if TYPE_CHECKING:
    from policies import Decision
    from router.execution import Executor

_CREDENTIALS = frozenset({401, 403})
_CLIENT_CLOSED = 499
"""As nginx logs a client that left."""


class Answer:
    """One request under way. Iterate once for its pieces; always `aclose()`."""

    def __init__(self, executor: Executor, incoming: Incoming) -> None:
        self._executor = executor
        self._resilience = executor.policy.resilience_of(incoming.model)
        self.incoming = incoming
        self.attempts: list[Attempt] = []
        self.usage: Usage | None = None
        self._decision: Decision | None = None
        self._target: Target | None = None
        self._reply: Reply | None = None
        self._pieces: AsyncIterator[Piece] | None = None
        self._held: list[Piece] = []
        """What arrived before the commit point: nothing, comments or role-only frames, and the first content."""
        self._arrived = time.monotonic()
        self._deadline = self._arrived + self._resilience.deadline_ms / 1000
        self._first_at: float | None = None
        self._last_at = self._arrived
        self._uncached_tokens = 0
        self._forecast: Forecast | None = None
        self._profile: Profile | None = None
        self._closed = False

    # --- facts ---------------------------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        assert self._decision is not None
        return self._decision

    @property
    def target(self) -> str:
        assert self._target is not None
        return self._target.name

    @property
    def transfer(self) -> KVTransfer | None:
        return None if self._reply is None else self._reply.transfer

    @property
    def placement(self) -> str | None:
        return None if self._reply is None else self._reply.placement

    @property
    def cost_usd(self) -> float | None:
        price = None if self._target is None else self._target.price
        if price is None or self.usage is None:
            return None
        return price.of(self.usage.prompt_tokens, self.usage.completion_tokens)

    # --- up to the commit point ----------------------------------------------------------------------

    async def start(self) -> None:
        """Decide and try, until a target has begun to answer. Raises RouterError."""
        executor = self._executor
        profile, counts, refusals = executor.profile(self.incoming)
        self._profile = profile
        self._decision = decision = executor.choose(profile)
        if decision.mirror is not None:
            executor.mirrors.send(decision.mirror, self.incoming)
        ready_at = dict.fromkeys(decision.order, 0.0)
        failures: dict[str, int] = {}
        error: BackendError | None = None
        while ready_at and len(self.attempts) <= self._resilience.retries:
            # The first in the policy's order that need not wait; where all must, the one that may go first.
            now = time.monotonic()
            name = next((name for name, at in ready_at.items() if at <= now), min(ready_at, key=lambda n: ready_at[n]))
            if ready_at[name] >= self._deadline:
                break
            target = executor.policy.targets[name]
            if ready_at[name] > now:
                await asyncio.sleep(ready_at[name] - now)
            # A decision has seen the limit; whoever is next after a failure, or after a while, may be full by now.
            limit = target.concurrency if self.attempts else None
            if limit is not None and executor.state[name].inflight >= limit:
                del ready_at[name]
                continue
            counted = counts.get(target.provider)
            # What the cluster foresaw was of the moment when the request came, not of after a failure.
            self._forecast = profile.forecasts.get(name) if not self.attempts else None
            self._uncached_tokens = profile.tokens_by_target.get(name, profile.prompt_tokens)
            if self._forecast is not None:
                self._uncached_tokens = self._forecast.uncached_tokens
            begun = time.monotonic()
            try:
                if target.provider in refusals:
                    raise refusals[target.provider]
                await self._attempt(target, counted)
            except BackendError as failed:
                error = failed
                seconds = time.monotonic() - begun
                self.attempts.append(Attempt(name, failed.status, seconds, failed.message))
                if time.monotonic() >= self._deadline:
                    break
                failures[name] = failures.get(name, 0) + 1
                if is_final(failed):
                    break
                if is_final_here(failed):
                    del ready_at[name]
                else:
                    ready_at[name] = time.monotonic() + wait_s(failed, failures[name])
            else:
                self.attempts.append(Attempt(name, 200, time.monotonic() - begun))
                return
        raise self._failure(error, ready_at)

    async def _attempt(self, target: Target, counted: PromptCount | None) -> None:
        """Open a call and read up to its first content. Raises BackendError."""
        incoming, resilience = self.incoming, self._resilience
        executor = self._executor
        until = self._deadline
        what = f"no complete answer within the deadline of {resilience.deadline_ms} ms"
        first_by = time.monotonic() + resilience.ttft_timeout_ms / 1000
        if incoming.stream and first_by < until:
            until, what = first_by, f"no content within ttft_timeout_ms ({resilience.ttft_timeout_ms} ms)"
        call = Call(
            request_id=incoming.request_id,
            surface=incoming.surface,
            body={**incoming.body, "model": target.model},
            stream=incoming.stream,
            goals=Goals(incoming.goals.ttft_ms, incoming.goals.tpot_ms),
            prompt_ids=None if counted is None else counted.prompt_ids,
            raw=incoming.raw,
            dropped=incoming.dropped,
        )
        self._target = target
        self._known = executor.state[target.name]
        self._load = self._known.begin()
        try:
            # The timer runs over everything up to the first content: headers, comments and role-only frames
            # do not satisfy it (litellm#5859, livekit/agents#6171).
            async with asyncio.timeout(until - time.monotonic()):
                self._reply = await open_call(executor.backends[target.provider], call)
                self._pieces = aiter(self._reply)
                await self._read_to_content()
        except TimeoutError:
            await self._abandon()
            raise BackendError(f"{target.name}: {what}", status=504, code="timeout") from None
        except BaseException:
            await self._abandon()
            raise
        self._first_at = self._last_at = time.monotonic()

    async def _read_to_content(self) -> None:
        assert self._pieces is not None
        self._held = []
        async for piece in self._pieces:
            self._held.append(piece)
            self.usage = piece.usage or self.usage
            if piece.content or piece.done:
                return
        raise BackendError("the answer ended before it began", status=502, code="stream_cut")

    async def _abandon(self) -> None:
        """Give up the attempt: upstream work is cancelled."""
        reply, self._reply, self._pieces, self._held = self._reply, None, None, []
        assert self._target is not None
        self._known.end()
        self._target = None
        self.usage = None
        if reply is not None:
            await reply.aclose()

    def _failure(self, error: BackendError | None, ready_at: Mapping[str, float]) -> RouterError:
        """What the client is told: the last failure, with what the provider said."""
        facts: dict[str, Any] = {"decision": self._decision, "attempts": self.attempts}
        if error is None:
            return RouterError("no attempt could be made within the deadline", status=504, code="timeout", **facts)
        if error.status in _CREDENTIALS:
            return RouterError(
                f"{self.attempts[-1].target}: the provider refused this gateway's credentials",
                status=502,
                code="provider_credentials",
                **facts,
            )
        wait = error.retry_after_s
        if error.status == 429 and ready_at:
            wait = max(0.0, min(ready_at.values()) - time.monotonic())
        return RouterError(
            error.message,
            status=error.status,
            kind=error.kind,
            code=error.code,
            param=error.param,
            retry_after_s=wait,
            **facts,
        )

    # --- after it ------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self._held:
            yield piece
        self._held = []
        if piece.done:
            await self.close(None)
            return
        assert self._pieces is not None and self._target is not None
        idle_s = self._resilience.idle_timeout_ms / 1000
        while True:
            # What is no content does not count as a sign of life (tensorzero#6328).
            idle_at = self._last_at + idle_s
            try:
                async with asyncio.timeout(min(idle_at, self._deadline) - time.monotonic()):
                    piece = await anext(self._pieces)
            except StopAsyncIteration:
                raise await self._broken(BackendError("the stream was cut", status=502, code="stream_cut")) from None
            except TimeoutError:
                late = (
                    f"silent for idle_timeout_ms ({self._resilience.idle_timeout_ms} ms)"
                    if idle_at < self._deadline
                    else f"not finished within the deadline of {self._resilience.deadline_ms} ms"
                )
                stalled = BackendError(f"{self._target.name}: the stream was {late}", status=504, code="timeout")
                raise await self._broken(stalled) from None
            except BackendError as error:
                raise await self._broken(error) from None
            if piece.content or piece.done:
                self._last_at = time.monotonic()
            self.usage = piece.usage or self.usage
            yield piece
            if piece.done:
                await self.close(None)
                return

    async def _broken(self, error: BackendError) -> RouterError:
        last = self.attempts[-1]
        self.attempts[-1] = Attempt(last.target, error.status, time.monotonic() - self._arrived, error.message)
        failure = self._failure(error, {})
        await self.close(failure)
        return failure

    def _learn_lengths(self, usage: Usage) -> None:
        assert self._profile is not None and self._decision is not None
        if self._profile.estimate is not None and usage.prompt_tokens:
            self._known.tokens.learn(self._profile.estimate, usage.prompt_tokens)
        if usage.completion_tokens:
            decision, state = self._decision, self._executor.state
            state.answered(decision.route, decision.class_name, usage.completion_tokens)
            if decision.choose == "spill-over" and (cost := self.cost_usd):
                state.now_s = time.monotonic()
                state.spend((decision.route, decision.rule), cost)

    async def aclose(self) -> None:
        """Release everything; where the answer was not finished, its work upstream is cancelled."""
        await self.close(asyncio.CancelledError())

    async def close(self, error: BaseException | None) -> None:
        """Record how the request ended, once (litellm#37140)."""
        if self._closed:
            return
        self._closed = True
        now = time.monotonic()
        executor = self._executor
        executor.ledger.metrics.in_flight.dec()
        ttft_s = tpot_s = None
        if self._first_at is not None:
            ttft_s = self._first_at - self._arrived if self.incoming.stream else None
            tokens = self.usage.completion_tokens if self.usage is not None else 0
            if self.incoming.stream and error is None and tokens > 1:
                tpot_s = (self._last_at - self._first_at) / (tokens - 1)
        target = self._target
        transfer = self.transfer
        executor.left(self)
        if target is not None:
            self._known.end()
            if error is None and self.usage is not None:
                self._learn_lengths(self.usage)
            if error is None and self._first_at is not None and ttft_s is not None:
                self._known.observe(
                    self._uncached_tokens, self.attempts[-1].seconds, tpot_s, self._load, self._forecast
                )
        executor.ledger.add(
            Record(
                request_id=self.incoming.request_id,
                surface=self.incoming.surface,
                decision=self._decision,
                target=None if target is None else target.name,
                status=_status_of(error),
                attempts=tuple(self.attempts),
                usage=self.usage,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                total_s=now - self._arrived,
                cost_usd=self.cost_usd,
                transfer=transfer,
                placement=self.placement,
                error=_name_of(error),
            )
        )
        if self._reply is not None:
            await self._reply.aclose()


def _status_of(error: BaseException | None) -> int:
    if error is None:
        return 200
    return error.status if isinstance(error, RouterError) else _CLIENT_CLOSED


def _name_of(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, RouterError):
        return error.code or error.kind
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
