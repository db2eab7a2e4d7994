"""One request under way: attempts inside one deadline until content can go to the client, and the rest relayed.

Before the first content (the commit point) a failure moves on to the next candidate, invisibly. After it the
answer cannot be replaced: it ends with an error, never as if it were whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backends.base import BackendError, KVTransfer, Piece, PromptCount, Usage
from policies import Profile, Target
from router.continuing import Shown, continued
from router.errors import RouterError
from router.hedging import hedge_at_ms, race
from router.incoming import Incoming
from router.ledger import Record
from router.results import Attempt, AttemptKind
from router.retrying import is_final, is_final_here, wait_s
from router.tried import Tried

if TYPE_CHECKING:
    from policies import Decision
    from router.execution import Executor

log = logging.getLogger("splitroute.router")

_CREDENTIALS = frozenset({401, 403})
_CLIENT_CLOSED = 499
"""As nginx logs a client that left."""
_SLOWER = (_CLIENT_CLOSED, "given up: another target was faster, or the client left")


class Answer:
    """One request under way. Iterate once for its pieces; always `aclose()`."""

    def __init__(self, executor: Executor, incoming: Incoming) -> None:
        self._executor = executor
        self._resilience = executor.policy.resilience_of(incoming.model)
        self.incoming = incoming
        self.attempts: list[Attempt] = []
        self._decision: Decision | None = None
        self._tried: Tried | None = None
        """The attempt that answers."""
        self._made = 0
        """Attempts so far; those that hedge do not count."""
        self._counts: Mapping[str, PromptCount] = {}
        self._shown = Shown() if incoming.stream and self._resilience.after_commit == "continue" else None
        self._arrived = time.monotonic()
        self._deadline = self._arrived + self._resilience.deadline_ms / 1000
        self._last_at = self._arrived
        self._profile: Profile | None = None
        self._closed = False

    # --- facts ---------------------------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        assert self._decision is not None
        return self._decision

    @property
    def target(self) -> str:
        assert self._tried is not None
        return self._tried.target.name

    @property
    def usage(self) -> Usage | None:
        return None if self._tried is None else self._tried.usage

    @property
    def transfer(self) -> KVTransfer | None:
        return None if self._tried is None or self._tried.reply is None else self._tried.reply.transfer

    @property
    def placement(self) -> str | None:
        return None if self._tried is None or self._tried.reply is None else self._tried.reply.placement

    @property
    def cost_usd(self) -> float | None:
        """Of the answer; what other attempts cost stands in `attempts`."""
        return None if self._tried is None else self._tried.cost_usd()

    # --- up to the commit point ----------------------------------------------------------------------

    async def start(self) -> None:
        """Decide and try, until a target has begun to answer. Raises RouterError."""
        executor, incoming = self._executor, self.incoming
        profile, counts, refusals = executor.profile(incoming)
        self._profile, self._counts = profile, counts
        self._decision = decision = await executor.admitted(profile, self._deadline)
        if decision.mirror is not None:
            executor.mirrors.send(decision.mirror, incoming)
        if (hedge := self._resilience.hedge) is not None:
            executor.budget_of(decision.route).request(hedge)
        ready_at = dict.fromkeys(decision.order, 0.0)
        failures: dict[str, int] = {}
        error: BackendError | None = None
        while ready_at and self._made <= self._resilience.retries:
            now = time.monotonic()
            name, at = self._next(ready_at, now)
            if at >= self._deadline:
                break
            target = executor.policy.targets[name]
            if at > now:
                await asyncio.sleep(at - now)
                if executor.state[name].shut_s(time.monotonic()) > 0:
                    continue  # another request was let through first, and has not been answered yet
            # A decision has seen these; whoever is next after a failure, or after a while, may be full by now.
            if self._made and (self._full(target) or not self._affordable(target)):
                del ready_at[name]
                continue
            try:
                if target.provider in refusals:
                    self.attempts.append(Attempt(name, refusals[target.provider].status, 0.0, "", self._kind(name)))
                    raise refusals[target.provider]
                self._tried = await self._try(target, ready_at)
                self._last_at = self._tried.last_at
                return
            except BackendError as failed:
                error = failed
                self.attempts[-1] = replace(self.attempts[-1], error=failed.message)
                if time.monotonic() >= self._deadline:
                    break
                failures[name] = failures.get(name, 0) + 1
                if is_final(failed):
                    break
                if is_final_here(failed):
                    del ready_at[name]
                else:
                    ready_at[name] = time.monotonic() + wait_s(failed, failures[name])
        raise self._failure(error, {name: self._ready(name, at) for name, at in ready_at.items()})

    def _next(self, ready_at: Mapping[str, float], now: float) -> tuple[str, float]:
        """The first in the policy's order that need not wait; where all must, the one that may go first."""
        ready = {name: self._ready(name, at) for name, at in ready_at.items()}
        name = next((name for name, at in ready.items() if at <= now), None) or min(ready, key=lambda n: ready[n])
        return name, ready[name]

    def _ready(self, name: str, at: float) -> float:
        """When `name` may be tried: not before `at`, and not while its breakers are open."""
        now = time.monotonic()
        shut_s = self._executor.state[name].shut_s(now)
        return max(at, now + shut_s) if shut_s else at

    def _full(self, target: Target) -> bool:
        known = self._executor.state[target.name]
        limit = known.limit(target)
        return limit is not None and known.inflight + known.reserved >= limit

    def _affordable(self, target: Target) -> bool:
        """Whether another attempt there stays within `max_cost_usd`, as far as it can be told."""
        most = self._resilience.max_cost_usd
        if most is None or target.price is None or self._profile is None or self._decision is None:
            return True
        prompt = self._profile.tokens_by_target.get(target.name, self._profile.prompt_tokens)
        answer = self._executor.state.answer_tokens(
            self._decision.route, self._decision.class_name, self._profile.max_tokens
        )
        spent = sum(attempt.cost_usd or 0.0 for attempt in self.attempts)
        return spent + target.price.of(prompt, answer) <= most

    def _kind(self, name: str) -> AttemptKind:
        if not self.attempts:
            return "first"
        return "retry" if any(attempt.target == name for attempt in self.attempts) else "fallback"

    def _new(self, target: Target, kind: AttemptKind) -> Tried:
        assert self._profile is not None
        tried = Tried(self._executor, self.incoming, target, kind, self._counts.get(target.provider))
        # What the cluster foresaw was of the moment when the request came, not of after a failure.
        tried.forecast = self._profile.forecasts.get(target.name) if kind == "first" else None
        tried.uncached_tokens = self._profile.tokens_by_target.get(target.name, self._profile.prompt_tokens)
        if tried.forecast is not None:
            tried.uncached_tokens = tried.forecast.uncached_tokens
        return tried

    async def _try(self, target: Target, ready_at: Mapping[str, float]) -> Tried:
        """An attempt that has begun to answer. Raises BackendError; either way its record is the last."""
        tried = self._new(target, self._kind(target.name))
        self._made += 1
        hedging = self._hedging(target, ready_at) if self._made == 1 else None
        if hedging is None:
            return await self._opened(tried)
        other, after_s = hedging

        def second() -> Coroutine[Any, Any, Tried] | None:
            return self._opened(self._new(other, "hedge")) if self._may_hedge(other) else None

        won, lost = await race(self._opened(tried), second, after_s)
        for slower in lost:
            self.attempts[self._at(slower)] = slower.attempt(*_SLOWER)
        # The answer's own attempt is the last one of the record.
        self.attempts.append(self.attempts.pop(self._at(won)))
        return won

    def _at(self, tried: Tried) -> int:
        return next(at for at, one in enumerate(self.attempts) if one.target == tried.target.name)

    async def _opened(self, tried: Tried) -> Tried:
        """`tried`, once it has begun to answer; its record is kept however it ends."""
        whole = self._resilience.after_commit == "restart" and self.incoming.stream
        try:
            await tried.open(self._deadline, whole=whole)
        except BackendError as failed:
            self.attempts.append(tried.attempt(failed.status, failed.message))
            raise
        except asyncio.CancelledError:
            self.attempts.append(tried.attempt(*_SLOWER))
            raise
        self.attempts.append(tried.attempt())
        return tried

    def _hedging(self, target: Target, ready_at: Mapping[str, float]) -> tuple[Target, float] | None:
        """Who would stand in for `target`, and how many seconds after the start."""
        hedge, profile, decision = self._resilience.hedge, self._profile, self._decision
        if hedge is None or not self.incoming.stream or profile is None or decision is None:
            return None
        executor, now = self._executor, time.monotonic()
        other = next((name for name in ready_at if name != target.name and self._ready(name, 0.0) <= now), None)
        if other is None:
            return None
        known = executor.state[target.name]
        prompt = profile.tokens_by_target.get(target.name, profile.prompt_tokens)
        predicted = known.predict(prompt)
        slow_ms = None
        if predicted is not None and predicted.residuals.enough:
            slow_ms = predicted.ttft_ms * predicted.residuals.quantile(1 - hedge.percent / 100)
        goal_ms = decision.goals.ttft_ms if decision.goals else None
        at_ms = hedge_at_ms(hedge, goal_ms, slow_ms, decision.predicted(other).ttft_ms)
        return None if at_ms is None else (executor.policy.targets[other], at_ms / 1000)

    def _may_hedge(self, other: Target) -> bool:
        hedge, profile, decision = self._resilience.hedge, self._profile, self._decision
        assert hedge is not None and profile is not None and decision is not None
        if self._full(other) or not self._affordable(other):
            return False
        prompt = profile.tokens_by_target.get(other.name, profile.prompt_tokens)
        usd = other.price.of(prompt, 0) if other.price is not None else 0.0
        return self._executor.budget_of(decision.route).take(hedge, time.monotonic(), usd)

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
        assert self._tried is not None
        for piece in self._tried.held:
            if self._shown is not None:
                self._shown.see(piece)
            yield piece
        self._tried.held = []
        if piece.done:
            await self.close(None)
            return
        idle_ms = self._resilience.idle_timeout_ms
        while True:
            try:
                # What is no content does not count as a sign of life (tensorzero#6328).
                piece = await self._tried.next_piece(self._last_at + idle_ms / 1000, self._deadline, idle_ms)
            except BackendError as error:
                async for piece in self._go_on(error):
                    yield piece
                return
            if piece.content or piece.done:
                self._last_at = time.monotonic()
            if self._shown is not None:
                self._shown.see(piece)
            yield piece
            if piece.done:
                await self.close(None)
                return

    async def _go_on(self, error: BackendError) -> AsyncIterator[Piece]:
        """After a failure in the middle: the rest of the answer from another target, where the policy wants that and
        it can be had. Raises RouterError."""
        assert self._tried is not None and self._decision is not None
        await self._tried.failed(error)
        self.attempts[-1] = replace(self._tried.attempt(error.status, error.message))
        while self._shown is not None and self._shown.text and self._made <= self._resilience.retries:
            began = self._shown
            going_on = self._continuation(began)
            if going_on is None:
                break
            target, incoming = going_on
            self._made += 1
            tried = self._new(target, "continue")
            tried.incoming = incoming
            try:
                self._tried = await self._opened(tried)
            except BackendError as failed:
                error = failed
                continue
            self._last_at = time.monotonic()
            joined = began.joined(self.incoming.surface)
            try:
                for piece in self._tried.held:
                    yield joined.piece(piece)
                while not piece.done:
                    idle_ms = self._resilience.idle_timeout_ms
                    piece = await self._tried.next_piece(self._last_at + idle_ms / 1000, self._deadline, idle_ms)
                    if piece.content or piece.done:
                        self._last_at = time.monotonic()
                    yield joined.piece(piece)
            except BackendError as failed:
                error = failed
                await self._tried.failed(error)
                self.attempts[-1] = self._tried.attempt(error.status, error.message)
                continue
            self._tried.usage = joined.usage or self._tried.usage
            await self.close(None)
            return
        failure = self._failure(error, {})
        await self.close(failure)
        raise failure

    def _continuation(self, shown: Shown) -> tuple[Target, Incoming] | None:
        """The next target that can go on after what was shown, and what it is to be asked."""
        assert self._decision is not None
        now = time.monotonic()
        failed = {attempt.target for attempt in self.attempts if attempt.error is not None}
        for name in sorted(self._decision.order, key=lambda name: name in failed):
            target = self._executor.policy.targets[name]
            options = self._executor.policy.providers[target.provider].options
            body = continued(self.incoming.surface, self.incoming.body, options, shown)
            if body is not None and self._ready(name, 0.0) <= now and not self._full(target):
                return target, replace(self.incoming, body=body, raw=None)
        return None

    def _learn_lengths(self, tried: Tried, usage: Usage) -> None:
        assert self._profile is not None and self._decision is not None
        if self._profile.estimate is not None and usage.prompt_tokens:
            tried.known.tokens.learn(self._profile.estimate, usage.prompt_tokens)
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
        self._executor.ledger.metrics.in_flight.dec()
        self._executor.left(self)
        try:
            self._record(error)
        except Exception:  # a bug, and no reason to keep an answer from its client
            log.exception("%s could not be recorded", self.incoming.request_id)
        if self._tried is not None:
            await (self._tried.aclose() if error is not None else self._tried.answered())

    def _record(self, error: BaseException | None) -> None:
        now = time.monotonic()
        ttft_s = tpot_s = None
        tried = self._tried
        if tried is not None:
            ttft_s = tried.first_at - self._arrived if self.incoming.stream else None
            tokens = tried.usage.completion_tokens if tried.usage is not None else 0
            if self.incoming.stream and error is None and tokens > 1:
                tpot_s = (self._last_at - tried.first_at) / (tokens - 1)
            if self.attempts[-1].error is None:
                self.attempts[-1] = tried.attempt()
        if tried is not None and error is None:
            if tried.usage is not None:
                self._learn_lengths(tried, tried.usage)
            if ttft_s is not None and tried.kind != "continue":
                seconds = tried.first_at - tried.begun
                tried.known.observe(tried.uncached_tokens, seconds, tpot_s, tried.load, tried.forecast)
        self._executor.ledger.add(
            Record(
                request_id=self.incoming.request_id,
                surface=self.incoming.surface,
                decision=self._decision,
                target=None if tried is None else tried.target.name,
                status=_status_of(error),
                attempts=tuple(self.attempts),
                usage=self.usage,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                total_s=now - self._arrived,
                cost_usd=self.cost_usd,
                transfer=self.transfer,
                placement=self.placement,
                error=_name_of(error),
            )
        )


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
