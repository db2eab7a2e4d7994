"""A worker: the engine, tied to its coordinator and to the peers it hands KV to or takes it from.

One thread runs `Worker.run`; others read the coordinator's messages and move KV. They meet in one inbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from backends.disagg.engine.engine import Engine, StepResult, Token
from backends.disagg.engine.kv_cache import as_bytes
from backends.disagg.engine.sequence import SamplingParams, Sequence, Status
from backends.disagg.leases import Leases
from backends.disagg.messages import (
    Abort,
    Cached,
    Failed,
    Meet,
    Resume,
    Source,
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
from backends.disagg.transfer import sockets
from backends.disagg.transfer.codecs import Codec, available
from backends.disagg.transfer.puller import Landed, Puller
from backends.disagg.transfer.server import KVServer
from backends.disagg.transfer.wire import Hello

if TYPE_CHECKING:
    import torch

    from backends.disagg.engine.grammar import Grammar, Grammars

log = logging.getLogger("splitroute.worker")

_STATE_INTERVAL_S = 0.25
_PATIENCE_S = 10.0
"""When the first token of a request without a goal is due: behind those with a nearer goal, but not all of them."""


class _Heartbeat(msgspec.Struct, frozen=True):
    requests: list[int]


class _PullFailed(msgspec.Struct, frozen=True):
    request: int
    reason: str


class _Compiled(msgspec.Struct, frozen=True):
    submit: Submit
    grammar: Grammar | None
    error: str = ""


Event = Submit | Resume | Abort | Meet | Stop | Landed | _Heartbeat | _PullFailed | _Compiled


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
        self.incarnation = secrets.token_hex(8)
        listeners = [sockets.listen(config.transport, config.kv_host)]
        self.server = KVServer(
            engine.cache, self.hello(), config.secret, listeners, self._heard, codecs_of(config.kv_codec)
        )
        self.pullers: dict[str, Puller] = {}
        self.sources: dict[int, Source] = {}
        """Where the KV of each request that is served here for another worker was computed, and is kept."""
        self.submitted_at: dict[int, float] = {}
        self.alloc_s: dict[int, float] = {}
        self.leases = Leases(config.lease_s)
        self._beat_at = 0.0
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
        self.say(
            Started(
                pid=os.getpid(),
                incarnation=self.incarnation,
                host=sockets.host_name(),
                addresses=self.server.addresses,
                num_blocks=self.engine.scheduler.pool.num_blocks,
                token_bytes=self.engine.geometry.token_bytes,
                dtype=self.engine.config.dtype,
                runner=type(self.engine.runner).__name__,
                step=self.engine.scheduler.step_time.coefficients,
            )
        )
        idle = True
        while not self.stopping:
            self.take_messages(wait=idle)
            self.keep_leases(time.monotonic())
            self.make_room()
            result = self.engine.step()
            idle = result.idle
            self.report(result)
            self.report_state(idle)

    def hello(self) -> Hello:
        geometry = self.engine.geometry
        return Hello(
            incarnation=self.incarnation,
            host=sockets.host_name(),
            pid=os.getpid(),
            fingerprint=self.config.fingerprint,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            num_blocks=self.engine.cache.num_blocks,
            codecs=[int(codec) for codec in available(geometry)],
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
            case Resume():
                self.resume(message)
            case Abort(request):
                self.drop(request)
            case _Heartbeat(requests):
                self.leases.extend(requests, time.monotonic())
            case _PullFailed(request, reason):
                if self.drop(request):
                    self.say(Failed(request, reason, kv_lost=True))
            case Meet(address, incarnation):
                self.puller_of(address, incarnation)
            case Stop():
                self.stopping = True
            case Landed():
                self.landed(message)

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
        self.submitted_at[seq.id] = now
        if message.source is not None:
            self.sources[seq.id] = message.source

    def resume(self, message: Resume) -> None:
        """Be the decode worker too, of what was to be handed over."""
        if (waiting := self.compiling.get(message.request)) is not None:
            self.compiling[message.request] = msgspec.structs.replace(waiting, hand_over=False)
            return
        seq = self.engine.scheduler.sequences.get(message.request)
        if seq is None:
            self.say(Failed(message.request, "the KV to go on from is gone (its lease ended)", kv_lost=True))
            return
        self.server.withdraw(message.request)
        self.leases.drop(message.request)
        seq.tpot_s = message.tpot_s
        self.engine.scheduler.resume(seq, message.replay)

    def drop(self, request: int) -> bool:
        """Forget a request and free all it has: it is done, or its client is gone. False where it was not here."""
        self.compiling.pop(request, None)
        self.server.withdraw(request)
        self.leases.drop(request)
        source = self.sources.pop(request, None)
        if source is not None and (puller := self.pullers.get(source.address)) is not None:
            puller.cancel(request)
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
        for chunk in result.chunks:
            seq = chunk.seq
            replayed = max(0, chunk.start + chunk.length - max(chunk.start, seq.prompt_len))
            self.replayed_tokens += replayed
            self.prefilled_tokens += chunk.length - replayed
            if not seq.prefill_only or not seq.blocks:
                continue  # stays here, or ended with its first token
            if chunk.start == seq.cached:
                blocks = seq.blocks[: pool.blocks_for(seq.prompt_len)]
                self.server.offer(seq.id, blocks, seq.prompt_len)
            end = chunk.start + chunk.length
            self.server.progress(seq.id, pool.blocks_for(end) if chunk.last else end // pool.block_size)
            if chunk.last:
                self.server.done(seq.id, seq.tokens[-1])
                self.leases.begin(seq.id, time.monotonic())
        for out in result.tokens:
            if out.finish_reason is not None:
                self.drop(out.seq.id)
        for seq in result.receive:
            self.start_pull(seq)
        if pool.changes:
            added = [key for key, here in pool.changes.items() if here]
            removed = [key for key, here in pool.changes.items() if not here]
            self.say(Cached(added, removed))
            pool.changes.clear()

    def start_pull(self, seq: Sequence) -> None:
        source, pool = self.sources[seq.id], self.engine.scheduler.pool
        self.alloc_s[seq.id] = time.monotonic() - self.submitted_at[seq.id]
        blocks = seq.blocks[: pool.blocks_for(seq.prompt_len)]
        puller = self.puller_of(source.address, source.incarnation)
        puller.pull(seq.id, source.request, blocks, seq.cached // pool.block_size)

    def puller_of(self, address: str, incarnation: str) -> Puller:
        """The connection to a worker that has KV to be pulled."""
        puller = self.pullers.get(address)
        if puller is None or puller.closed or puller.incarnation != incarnation:
            if puller is not None:
                puller.close()
            self.pullers = {address: puller for address, puller in self.pullers.items() if not puller.closed}
            puller = self.pullers[address] = Puller(
                self.engine.cache,
                self.hello(),
                self.config.secret,
                address,
                incarnation,
                self.inbox.put,
                lambda request, reason: self.inbox.put(_PullFailed(request, reason)),
            )
        return puller

    def landed(self, landed: Landed) -> None:
        seq = self.engine.scheduler.sequences.get(landed.pull)
        if seq is None:
            return  # aborted meanwhile
        self.engine.scheduler.received(seq, landed.first_token, exact=landed.exact)
        address = self.sources[seq.id].address
        self.say(
            Transferred(
                request=landed.pull,
                transport="shm" if address.startswith("unix:") else "tcp",
                codec=landed.codec,
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

    def _heard(self, requests: list[int]) -> None:
        self.inbox.put(_Heartbeat(requests))

    def keep_leases(self, now: float) -> None:
        """Free KV whose decode worker is heard of no more, and let those of whose KV this is one hear of it."""
        for request in self.leases.ended(now):
            if self.drop(request):
                log.warning("the lease of request %d's KV has ended; it is freed", request)
        if now < self._beat_at or not self.sources:
            return
        self._beat_at = now + self.config.lease_s / 4
        served: dict[str, tuple[Source, list[int]]] = {}
        for source in self.sources.values():
            served.setdefault(source.address, (source, []))[1].append(source.request)
        for source, requests in served.values():
            puller = self.pullers.get(source.address)
            if puller is None or not puller.closed:
                self.puller_of(source.address, source.incarnation).heartbeat(requests)

    def make_room(self) -> None:
        """Move KV that is kept for other workers to host memory where blocks are short; the oldest goes first."""
        scheduler, cache = self.engine.scheduler, self.engine.cache
        short = scheduler.short_of
        if not short:
            return
        for request in self.leases.requests():
            seq = scheduler.sequences[request]
            if not seq.blocks:
                continue
            room = self.config.spill_tokens // scheduler.pool.block_size - self._spilled_blocks() - len(seq.blocks)
            if room < 0:
                return
            saved: list[torch.Tensor] = []

            def save(seq: Sequence = seq, saved: list[torch.Tensor] = saved) -> memoryview:
                saved.append(cache.save(seq.blocks))
                return as_bytes(saved[0])

            if not self.server.spill(request, save):
                continue  # it is being read
            short -= len(seq.blocks)
            scheduler.spilled(seq, saved[0])
            if short <= 0:
                return

    def _spilled_blocks(self) -> int:
        scheduler = self.engine.scheduler
        held = (scheduler.sequences[request] for request in self.leases.requests())
        return sum(scheduler.pool.blocks_for(seq.prompt_len + 1) for seq in held if seq.host_kv is not None)

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
        if state != sent:
            self.say(state)
            self._last_state = (now, state)


def codecs_of(option: str) -> list[Codec]:
    """Those that a sender may use, the most faithful first."""
    if option == "auto":
        return [Codec.RAW, Codec.LOSSLESS, Codec.INT8, Codec.NEAR]
    if option == "exact":
        return [Codec.RAW, Codec.LOSSLESS]
    return [Codec[option.upper()]]


def _token_out(out: Token) -> TokenOut:
    cached = out.seq.cached if out.index == 0 else 0
    return TokenOut(out.seq.id, out.index, out.token, out.finish_reason, cached, list(out.logprobs or ()) or None)
