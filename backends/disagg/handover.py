"""A worker's part in handing KV over: what it offers and keeps for others, and what it pulls from them.

The engine's thread calls everything here; what other threads notice goes to the worker's inbox through `tell`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import msgspec

from backends.disagg.engine.engine import Engine
from backends.disagg.engine.scheduler import Chunk
from backends.disagg.engine.sequence import Sequence
from backends.disagg.leases import Leases
from backends.disagg.messages import Source, Transferred, WorkerConfig
from backends.disagg.tls import client_context, server_context
from backends.disagg.transfer import sockets
from backends.disagg.transfer.codecs import available, named
from backends.disagg.transfer.nixl import Nixl
from backends.disagg.transfer.puller import Landed, Puller
from backends.disagg.transfer.server import KVServer
from backends.disagg.transfer.wire import Hello


class Heartbeat(msgspec.Struct, frozen=True):
    """A decode worker is at work on these."""

    requests: list[int]


class PullFailed(msgspec.Struct, frozen=True):
    request: int
    reason: str


HandoverEvent = Landed | Heartbeat | PullFailed


class Handover:
    def __init__(self, config: WorkerConfig, engine: Engine, tell: Callable[[HandoverEvent], None]) -> None:
        self.engine = engine
        self._secret = config.secret
        self._spill_tokens = config.spill_tokens
        self._tell = tell
        geometry = engine.geometry
        incarnation = secrets.token_hex(8)
        self.nixl = Nixl(incarnation, engine.cache) if config.transport == "nixl" else None
        self.hello = Hello(
            incarnation=incarnation,
            host=sockets.host_name(),
            pid=os.getpid(),
            fingerprint=config.fingerprint,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            num_blocks=engine.cache.num_blocks,
            codecs=[int(codec) for codec in available(geometry)],
            nixl=self.nixl.metadata if self.nixl else b"",
            base=self.nixl.base if self.nixl else 0,
        )
        listeners = [sockets.listen(config.transport, config.kv_host or "127.0.0.1", config.kv_port)]
        if config.transport == "shm" and config.kv_host:  # for those who are elsewhere
            listeners.append(sockets.listen("tcp", config.kv_host, config.kv_port))
        self._tls = None if config.tls is None else client_context(config.tls.ca)
        self.server = KVServer(
            engine.cache,
            self.hello,
            config.secret,
            listeners,
            lambda requests: tell(Heartbeat(requests)),
            named(config.kv_codec),
            self.nixl,
            None if config.tls is None else server_context(config.tls.cert, config.tls.key),
        )
        self.pullers: dict[str, Puller] = {}
        """By address."""
        self.sources: dict[int, Source] = {}
        """Where the KV of each request that is served here for another worker was computed, and is kept."""
        self.leases = Leases(config.lease_s)
        self._beat_at = 0.0
        self._submitted_at: dict[int, float] = {}
        self._alloc_s: dict[int, float] = {}

    def offer(self, chunk: Chunk) -> None:
        """A chunk of a prompt that is to be handed over is complete."""
        seq, pool = chunk.seq, self.engine.scheduler.pool
        if chunk.start == seq.cached:
            self.server.offer(seq.id, seq.blocks[: pool.blocks_for(seq.prompt_len)], seq.prompt_len)
        end = chunk.start + chunk.length
        self.server.progress(seq.id, pool.blocks_for(end) if chunk.last else end // pool.block_size)
        if chunk.last:
            self.server.done(seq.id, seq.tokens[-1])
            self.leases.begin(seq.id, time.monotonic())

    def expect(self, request: int, source: Source, now: float) -> None:
        """`request` goes on from KV that is at `source`."""
        self.sources[request] = source
        self._submitted_at[request] = now

    def forget(self, request: int) -> None:
        """Nothing of `request` is offered, kept or awaited any more; its blocks are its sequence's to free."""
        self.server.withdraw(request)
        self.leases.drop(request)
        source = self.sources.pop(request, None)
        if source is not None and (puller := self.pullers.get(source.address)) is not None:
            puller.cancel(request)
        self._submitted_at.pop(request, None)
        self._alloc_s.pop(request, None)

    def pull(self, seq: Sequence) -> None:
        """Fetch the KV that `seq`, which has its blocks now, goes on from."""
        source, pool = self.sources[seq.id], self.engine.scheduler.pool
        self._alloc_s[seq.id] = time.monotonic() - self._submitted_at[seq.id]
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
                self.hello,
                self._secret,
                address,
                incarnation,
                self._tell,
                lambda request, reason: self._tell(PullFailed(request, reason)),
                self.nixl,
                self._tls,
            )
        return puller

    def reset(self) -> None:
        """No request is left, and whom KV was pulled from may be of no cluster of this worker's any more."""
        for puller in self.pullers.values():
            puller.close()
        self.pullers.clear()

    def landed(self, landed: Landed) -> Transferred | None:
        """KV has arrived: its sequence may go on. What there is to say of it; None where nobody wants it any more."""
        seq = self.engine.scheduler.sequences.get(landed.pull)
        if seq is None:
            return None  # aborted meanwhile
        self.engine.scheduler.received(seq, landed.first_token, exact=landed.exact)
        return Transferred(
            request=landed.pull,
            transport=landed.transport,
            codec=landed.codec,
            bytes=landed.bytes,
            prefill_pid=landed.prefill_pid,
            decode_pid=os.getpid(),
            queue_s=landed.queue_s,
            alloc_s=self._alloc_s.pop(seq.id, 0.0),
            wire_s=landed.wire_s,
            codec_s=landed.codec_s,
            exposed_s=landed.exposed_s,
        )

    def keep_leases(self, now: float) -> list[int]:
        """Those whose lease is over, to be dropped; and from time to time, a word for those whose KV is used here."""
        ended = self.leases.ended(now)
        if now < self._beat_at or not self.sources:
            return ended
        self._beat_at = now + self.leases.length_s / 4
        served: dict[str, tuple[Source, list[int]]] = {}
        for source in self.sources.values():
            served.setdefault(source.address, (source, []))[1].append(source.request)
        for source, requests in served.values():
            puller = self.pullers.get(source.address)
            if puller is None or not puller.closed:
                self.puller_of(source.address, source.incarnation).heartbeat(requests)
        return ended

    def make_room(self) -> None:
        """Move KV that is kept for other workers to host memory where blocks are short; the oldest goes first."""
        scheduler = self.engine.scheduler
        short, pool = scheduler.short_of, scheduler.pool
        if not short:
            return
        kept = [scheduler.sequences[request] for request in self.leases.requests()]
        spilled = sum(pool.blocks_for(seq.prompt_len + 1) for seq in kept if seq.host_kv is not None)
        room = self._spill_tokens // pool.block_size - spilled
        for seq in kept:
            count = len(seq.blocks)
            if short <= 0 or count > room:
                return
            if not count or (saved := self.server.spill(seq.id, seq.blocks)) is None:
                continue  # it lies there already, or is being read
            scheduler.spilled(seq, saved)
            short -= count
            room -= count
