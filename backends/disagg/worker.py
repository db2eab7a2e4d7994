"""A worker: the engine, tied to its coordinator and to the peers it hands KV to or takes it from.

One thread runs `Worker.run`; others read the coordinator's messages and move KV. They meet in one inbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from backends.disagg.engine.engine import Engine, StepResult, Token
from backends.disagg.engine.sequence import SamplingParams, Sequence, Status
from backends.disagg.handover import Handover, HandoverEvent, Heartbeat, PullFailed
from backends.disagg.messages import (
    Abort,
    Cached,
    Failed,
    Meet,
    Reset,
    Resume,
    Started,
    State,
    Stop,
    Submit,
    TokenOut,
    Tokens,
    WorkerConfig,
    frame,
)
from backends.disagg.transfer.puller import Landed

if TYPE_CHECKING:
    from backends.disagg.engine.grammar import Grammar, Grammars

log = logging.getLogger("splitroute.worker")

_STATE_INTERVAL_S = 0.25
_SIGN_OF_LIFE_S = 2.0
"""The coordinator hears something at least so often, or it takes this worker to be hung."""
_PATIENCE_S = 10.0
"""When the first token of a request without a goal is due: behind those with a nearer goal, but not all of them."""


class _Compiled(msgspec.Struct, frozen=True):
    submit: Submit
    grammar: Grammar | None
    error: str = ""


Event = Submit | Resume | Abort | Meet | Reset | Stop | HandoverEvent | _Compiled


class Worker:
    """Serves what arrives in `inbox`; answers on `control`."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        control: socket.socket,
        inbox: queue.SimpleQueue[Event],
        load_grammars: Callable[[], Grammars],
    ) -> None:
        self.config = config
        self.engine = engine
        self.control = control
        self.inbox = inbox
        self.handover = Handover(config, engine, inbox.put)
        self.prefilled_tokens = self.replayed_tokens = 0
        self._last_state: tuple[float, State | None] = (0.0, None)
        self.stopping = False
        self.compiling: dict[int, Submit] = {}
        """Requests whose grammar is being compiled."""
        self._compilations: queue.SimpleQueue[Submit] | None = None
        self._load_grammars = load_grammars
        if config.prefix_cache:
            engine.scheduler.pool.changes = {}

    # --- life ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        self.introduce()
        idle = True
        while not self.stopping:
            self.take_messages(wait=idle)
            for request in self.handover.keep_leases(time.monotonic()):
                log.warning("the lease of request %d's KV has ended; it is freed", request)
                self.drop(request)
            self.handover.make_room()
            result = self.engine.step()
            idle = result.idle
            self.report(result)
            self.report_state(idle)

    def introduce(self) -> None:
        self.say(
            Started(
                pid=os.getpid(),
                incarnation=self.handover.hello.incarnation,
                host=self.handover.hello.host,
                addresses=self.handover.server.addresses,
                num_blocks=self.engine.scheduler.pool.num_blocks,
                token_bytes=self.engine.geometry.token_bytes,
                dtype=self.engine.config.dtype,
                runner=type(self.engine.runner).__name__,
                step=self.engine.scheduler.step_time.coefficients,
            )
        )

    def reset(self) -> None:
        """Be as after the start, but for the prompts' prefixes that are still in the cache."""
        for request in [*self.compiling, *self.engine.scheduler.sequences]:
            self.drop(request)
        self.handover.reset()
        self.prefilled_tokens = self.replayed_tokens = 0
        self._last_state = (0.0, None)
        self.introduce()
        pool = self.engine.scheduler.pool
        if pool.changes is not None:
            pool.changes.clear()
            self.say(Cached(pool.keys(), []))

    def say(self, message: msgspec.Struct) -> None:
        try:
            self.control.sendall(frame(message))
        except OSError:
            os._exit(0)  # the coordinator is gone

    # --- messages ------------------------------------------------------------------------------------

    def take_messages(self, *, wait: bool) -> None:
        """Handle all that is in the inbox; `wait` for something where there is nothing to compute."""
        if wait:
            with contextlib.suppress(queue.Empty):
                self.handle(self.inbox.get(timeout=_STATE_INTERVAL_S))
        while not self.inbox.empty():
            self.handle(self.inbox.get())

    def handle(self, message: Event) -> None:
        match message:
            case Submit(grammar=None):
                self.submit(message)
            case Submit():
                self.compile(message)
            case _Compiled(submit, grammar, error):
                self.compiled(submit, grammar, error)
            case Resume():
                self.resume(message)
            case Abort(request):
                self.drop(request)
            case Heartbeat(requests):
                self.handover.leases.extend(requests, time.monotonic())
            case PullFailed(request, reason):
                if self.drop(request):
                    self.say(Failed(request, reason, kv_lost=True))
            case Meet(address, incarnation):
                self.handover.puller_of(address, incarnation)
            case Reset():
                self.reset()
            case Stop():
                self.stopping = True
            case Landed():
                if (moved := self.handover.landed(message)) is not None:
                    self.say(moved)

    def compile(self, message: Submit) -> None:
        """Let a thread make the grammar: reading a vocabulary for the first one takes a second or two."""
        if self._compilations is None:
            self._compilations = queue.SimpleQueue()
            threading.Thread(target=self._compile_all, args=(self._compilations,), name="grammar", daemon=True).start()
        self.compiling[message.request] = message
        self._compilations.put(message)

    def _compile_all(self, messages: queue.SimpleQueue[Submit]) -> None:
        grammars: Grammars | None = None
        while True:
            message = messages.get()
            try:
                grammars = grammars or self._load_grammars()
                assert message.grammar is not None
                self.inbox.put(_Compiled(message, grammars.compile(message.grammar)))
            except Exception as error:  # whatever it is, this request fails and the worker lives
                self.inbox.put(_Compiled(message, None, str(error) or type(error).__name__))

    def compiled(self, message: Submit, grammar: Grammar | None, error: str) -> None:
        if message.request not in self.compiling:
            return  # aborted meanwhile
        message = self.compiling.pop(message.request)
        if grammar is None:
            self.say(Failed(message.request, f"the answer's form cannot be enforced: {error}", status=400))
        else:
            self.submit(message, grammar)

    def submit(self, message: Submit, grammar: Grammar | None = None) -> None:
        now = time.monotonic()
        asked = msgspec.structs.asdict(message.sampling)
        asked["stop_ids"] = frozenset(asked["stop_ids"])
        asked["logit_bias"] = tuple(asked["logit_bias"])
        seq = Sequence(
            id=message.request,
            tokens=list(message.prompt_ids),
            params=SamplingParams(**asked),
            prefill_only=message.hand_over,
            remote_kv=message.source is not None,
            deadline=now + (_PATIENCE_S if message.ttft_s is None else message.ttft_s),
            tpot_s=message.tpot_s,
            grammar=grammar,
            replay=message.replay,
        )
        try:
            self.engine.scheduler.add(seq)
        except ValueError as error:
            self.say(Failed(message.request, str(error), status=400))
            return
        if message.source is not None:
            self.handover.expect(seq.id, message.source, now)

    def resume(self, message: Resume) -> None:
        """Be the decode worker too, of what was to be handed over."""
        if (waiting := self.compiling.get(message.request)) is not None:
            self.compiling[message.request] = msgspec.structs.replace(waiting, hand_over=False)
            return
        seq = self.engine.scheduler.sequences.get(message.request)
        if seq is None:
            self.say(Failed(message.request, "the KV to go on from is gone (its lease ended)", kv_lost=True))
            return
        self.handover.forget(message.request)
        seq.tpot_s = message.tpot_s
        self.engine.scheduler.resume(seq, message.replay)

    def drop(self, request: int) -> bool:
        """Forget a request and free all it has: it is done, or its client is gone. False where it was not here."""
        self.compiling.pop(request, None)
        self.handover.forget(request)
        seq = self.engine.scheduler.sequences.get(request)
        if seq is None:
            return False
        self.engine.scheduler.finish(seq)
        return True

    # --- the hand-over -------------------------------------------------------------------------------

    def report(self, result: StepResult) -> None:
        """Tell the coordinator and the KV peers what a step did."""
        pool = self.engine.scheduler.pool
        for out in result.tokens:
            if out.finish_reason is not None and out.seq.grammar is not None and (error := out.seq.grammar.error):
                self.say(Failed(out.seq.id, f"the answer lost its form: {error}", status=500))
        if result.tokens:  # first: a decode worker's tokens must not overtake the first one
            self.say(Tokens([_token_out(out) for out in result.tokens]))
        for chunk in result.chunks:
            seq = chunk.seq
            replayed = max(0, chunk.start + chunk.length - max(chunk.start, seq.prompt_len))
            self.replayed_tokens += replayed
            self.prefilled_tokens += chunk.length - replayed
            if seq.prefill_only and seq.blocks:  # it neither stays here nor ended with its first token
                self.handover.offer(chunk)
        for out in result.tokens:
            if out.finish_reason is not None:
                self.drop(out.seq.id)
        for seq in result.receive:
            self.handover.pull(seq)
        if pool.changes:
            added = [key for key, here in pool.changes.items() if here]
            removed = [key for key, here in pool.changes.items() if not here]
            self.say(Cached(added, removed))
            pool.changes.clear()

    def report_state(self, idle: bool) -> None:
        now = time.monotonic()
        sent_at, sent = self._last_state
        if not idle and now - sent_at < _STATE_INTERVAL_S:
            return
        scheduler = self.engine.scheduler
        state = State(
            free_blocks=scheduler.pool.free_count,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running) + len(scheduler.prefilling),
            held=sum(seq.status is Status.HELD for seq in scheduler.sequences.values()),
            prefilled_tokens=self.prefilled_tokens,
            replayed_tokens=self.replayed_tokens,
            context=sum(len(seq.tokens) for seq in scheduler.running),
            step=scheduler.step_time.coefficients,
        )
        if state != sent or now - sent_at >= _SIGN_OF_LIFE_S:
            self.say(state)
            self._last_state = (now, state)


def _token_out(out: Token) -> TokenOut:
    cached = out.seq.cached if out.index == 0 else 0
    return TokenOut(out.seq.id, out.index, out.token, out.finish_reason, cached, list(out.logprobs or ()) or None)
