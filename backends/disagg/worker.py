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
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from backends.disagg.engine.engine import Engine, StepResult, Token
from backends.disagg.engine.sequence import SamplingParams, Sequence, Status
from backends.disagg.messages import (
    Abort,
    Failed,
    Started,
    State,
    Stop,
    Submit,
    TokenOut,
    Tokens,
    Transferred,
    WorkerConfig,
    frame,
)
from backends.disagg.transfer.puller import Landed, Puller
from backends.disagg.transfer.server import KVServer
from backends.disagg.transfer.wire import Hello, WireError

if TYPE_CHECKING:
    from backends.disagg.engine.grammar import Grammar, Grammars

log = logging.getLogger("splitroute.worker")

_STATE_INTERVAL_S = 0.25
_PATIENCE_S = 10.0
"""When the first token of a request without a goal is due: behind those with a nearer goal, but not all of them."""


class _Released(msgspec.Struct, frozen=True):
    request: int


class _PullFailed(msgspec.Struct, frozen=True):
    request: int
    reason: str


class _Compiled(msgspec.Struct, frozen=True):
    submit: Submit
    grammar: Grammar | None
    error: str = ""


Event = Submit | Abort | Stop | Landed | _Released | _PullFailed | _Compiled


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
        self.server: KVServer | None = None
        self.pullers: dict[str, Puller] = {}
        self.sources: dict[int, str] = {}
        """Where each request that pulls its KV pulls it from."""
        self.submitted_at: dict[int, float] = {}
        self.alloc_s: dict[int, float] = {}
        self.leases: deque[tuple[float, int]] = deque()
        """(end, request) of KV held for a decode worker; every lease is equally long, so the first ends first."""
        self._last_state: tuple[float, State | None] = (0.0, None)
        self.stopping = False
        self.compiling: set[int] = set()
        """Requests whose grammar is being compiled."""
        self._compilations: queue.SimpleQueue[Submit] | None = None
        self._load_grammars = load_grammars

    # --- life ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        if self.config.role == "prefill":
            self.server = KVServer(
                self.engine.cache,
                self.hello(),
                self.config.transport,
                lambda request: self.inbox.put(_Released(request)),
            )
        self.say(
            Started(
                pid=os.getpid(),
                address=self.server.address if self.server else None,
                num_blocks=self.engine.scheduler.pool.num_blocks,
                dtype=self.engine.config.dtype,
                runner=type(self.engine.runner).__name__,
            )
        )
        idle = True
        while not self.stopping:
            self.take_messages(wait=idle)
            self.end_leases(time.monotonic())
            result = self.engine.step()
            idle = result.idle
            self.report(result)
            self.report_state(idle)

    def hello(self) -> Hello:
        geometry = self.engine.geometry
        return Hello(
            token=self.config.token,
            pid=os.getpid(),
            fingerprint=self.config.fingerprint,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            num_blocks=self.engine.cache.num_blocks,
            transport=self.config.transport,
        )

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
            case Abort(request):
                self.abort(request)
            case _Released(request):
                self.drop(request)
            case _PullFailed(request, reason):
                if self.drop(request):
                    self.say(Failed(request, reason))
            case Stop():
                self.stopping = True
            case Landed():
                self.landed(message)

    def compile(self, message: Submit) -> None:
        """Let a thread make the grammar: reading a vocabulary for the first one takes a second or two."""
        if self._compilations is None:
            self._compilations = queue.SimpleQueue()
            threading.Thread(target=self._compile_all, args=(self._compilations,), name="grammar", daemon=True).start()
        self.compiling.add(message.request)
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
        self.compiling.remove(message.request)
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
            prefill_only=self.config.role == "prefill",
            remote_kv=message.source is not None,
            deadline=now + (_PATIENCE_S if message.ttft_s is None else message.ttft_s),
            tpot_s=message.tpot_s,
            grammar=grammar,
        )
        try:
            self.engine.scheduler.add(seq)
        except ValueError as error:
            self.say(Failed(message.request, str(error), status=400))
            return
        self.submitted_at[seq.id] = now
        if message.source is not None:
            self.sources[seq.id] = message.source

    def abort(self, request: int) -> None:
        """The client is gone: free everything, at once or as soon as a transfer into it has stopped."""
        self.compiling.discard(request)
        source = self.sources.get(request)
        puller = self.pullers.get(source) if source else None
        if puller is not None and not puller.cancel(request):
            return  # `_PullFailed` follows
        self.drop(request)

    def drop(self, request: int) -> bool:
        """Forget a request and free its blocks; False where it was not here."""
        if self.server is not None:
            self.server.withdraw(request)
        self.sources.pop(request, None)
        self.submitted_at.pop(request, None)
        self.alloc_s.pop(request, None)
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
        if self.server is not None:
            for chunk in result.chunks:
                seq = chunk.seq
                if not seq.blocks:
                    continue  # ended with its first token
                if chunk.start == seq.cached:
                    blocks = seq.blocks[: pool.blocks_for(seq.prompt_len)]
                    self.server.offer(seq.id, blocks, seq.prompt_len)
                end = chunk.start + chunk.length
                self.server.progress(seq.id, pool.blocks_for(end) if chunk.last else end // pool.block_size)
                if chunk.last:
                    self.server.done(seq.id, seq.tokens[-1])
                    self.leases.append((time.monotonic() + self.config.lease_s, seq.id))
        for out in result.tokens:
            if out.finish_reason is not None:
                self.drop(out.seq.id)
        for seq in result.receive:
            self.start_pull(seq)

    def start_pull(self, seq: Sequence) -> None:
        source = self.sources[seq.id]
        puller = self.pullers.get(source)
        if puller is None or puller.closed:
            try:
                puller = Puller(
                    self.engine.cache,
                    self.hello(),
                    source,
                    self.inbox.put,
                    lambda request, reason: self.inbox.put(_PullFailed(request, reason)),
                )
            except (WireError, OSError, EOFError) as error:
                self.inbox.put(_PullFailed(seq.id, f"the prefill worker cannot be reached: {error}"))
                return
            self.pullers[source] = puller
        self.alloc_s[seq.id] = time.monotonic() - self.submitted_at[seq.id]
        puller.pull(seq.id, seq.blocks[: self.engine.scheduler.pool.blocks_for(seq.prompt_len)])

    def landed(self, landed: Landed) -> None:
        seq = self.engine.scheduler.sequences.get(landed.request)
        if seq is None:
            return  # aborted meanwhile
        self.engine.scheduler.received(seq, landed.first_token)
        self.sources.pop(seq.id)
        self.say(
            Transferred(
                request=landed.request,
                transport=self.config.transport,
                codec="raw",
                bytes=landed.bytes,
                prefill_pid=landed.prefill_pid,
                decode_pid=os.getpid(),
                queue_s=landed.queue_s,
                alloc_s=self.alloc_s.pop(seq.id, 0.0),
                wire_s=landed.wire_s,
                codec_s=landed.codec_s,
                exposed_s=landed.exposed_s,
            )
        )

    def end_leases(self, now: float) -> None:
        """Free KV that no decode worker took in time (vllm#46283), whichever lease comes first (vllm#58222)."""
        while self.leases and self.leases[0][0] <= now:
            _, request = self.leases.popleft()
            if self.drop(request):
                log.warning("the KV of request %d was not taken within its lease and is freed", request)

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
        )
        if state != sent:
            self.say(state)
            self._last_state = (now, state)


def _token_out(out: Token) -> TokenOut:
    cached = out.seq.cached if out.index == 0 else 0
    return TokenOut(out.seq.id, out.index, out.token, out.finish_reason, cached, list(out.logprobs or ()) or None)
