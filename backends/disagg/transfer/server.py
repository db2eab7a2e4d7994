"""The prefill side of the hand-over: offers prompts' KV while and after it is computed.

The engine's thread says what is ready (`offer`, `progress`, `done`, `withdraw`); a thread per peer reads
requests and another sends, so computing never waits for a socket. Blocks belong to the engine: it frees
them only after `withdraw`, and READY is sent only for an offer that has not been withdrawn. What a decode
worker accepts was therefore never overwritten while it was read.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import xxhash

from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.transfer import sockets
from backends.disagg.transfer.wire import SHARED, Codec, Header, Hello, Kind, Ready, WireError, parse

log = logging.getLogger("splitroute.transfer")


@dataclass(slots=True)
class _Offer:
    blocks: list[int]
    prompt_tokens: int
    ready: int = 0
    """Blocks from the first whose KV is complete."""
    ready_at: float = 0.0
    sent: int = 0
    queue_s: float = 0.0
    codec_s: float = 0.0
    first_token: int | None = None
    done_at: float = 0.0
    withdrawn: bool = False
    peer: _Peer | None = None


class KVServer:
    """Serves blocks of `cache`. `on_release(request)` is called from a peer's thread."""

    def __init__(self, cache: KVCache, hello: Hello, transport: str, on_release: Callable[[int], None]) -> None:
        self.cache = cache
        self.hello = hello
        self.shared = transport == "shm"
        self._on_release = on_release
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._early_pulls: dict[int, _Peer] = {}
        """Peers that asked before the request was offered here."""
        self._gone: deque[int] = deque(maxlen=4096)
        self._listener, self.address = sockets.listen(transport)
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    # --- the engine's side ---------------------------------------------------------------------------

    def offer(self, request: int, blocks: list[int], prompt_tokens: int) -> None:
        """Announce that `blocks` will hold the KV of `request`'s prompt."""
        with self._lock:
            self._offers[request] = offer = _Offer(blocks, prompt_tokens)
            offer.peer = self._early_pulls.pop(request, None)

    def progress(self, request: int, ready: int) -> None:
        """The first `ready` blocks of an offer are complete."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is None:
                return
            fresh = offer.blocks[offer.ready : ready]
        self.cache.publish(fresh)
        with self._lock:
            offer.ready, offer.ready_at = ready, time.monotonic()
            self._wake(request, offer)

    def done(self, request: int, first_token: int) -> None:
        """All blocks are complete and the first token is known."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is not None:
                offer.first_token, offer.done_at = first_token, time.monotonic()
                self._wake(request, offer)

    def withdraw(self, request: int) -> None:
        """The blocks are about to be freed: nothing of them may be accepted any more."""
        with self._lock:
            offer = self._offers.pop(request, None)
            self._early_pulls.pop(request, None)
            self._gone.append(request)
            if offer is not None:
                offer.withdrawn = True
                self._wake(request, offer)

    def _wake(self, request: int, offer: _Offer) -> None:
        if offer.peer is not None:
            offer.peer.outbox.put((request, offer))

    # --- the peers' side -----------------------------------------------------------------------------

    def pull(self, request: int, peer: _Peer) -> None:
        with self._lock:
            offer = self._offers.get(request)
            if offer is not None:
                offer.peer = peer
                offer.sent = 0
                self._wake(request, offer)
            elif request in self._gone:
                peer.outbox.put((request, None))
            else:
                self._early_pulls[request] = peer

    def release(self, request: int) -> None:
        with self._lock:
            early = self._early_pulls.pop(request, None)
        if early is not None:
            early.outbox.put((request, None))  # the peer waits for this answer before it reuses its blocks
        self._on_release(request)

    def forget(self, peer: _Peer) -> None:
        """`peer` has gone: its offers may be pulled by another one."""
        with self._lock:
            for offer in self._offers.values():
                if offer.peer is peer:
                    offer.peer = None
            for request in [r for r, early in self._early_pulls.items() if early is peer]:
                del self._early_pulls[request]

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=_Peer(self, connection).serve, name="kv-peer", daemon=True).start()


class _Peer:
    """One decode worker's connection."""

    def __init__(self, server: KVServer, connection: socket.socket) -> None:
        self.server = server
        self.connection = connection
        self.outbox: queue.SimpleQueue[tuple[int, _Offer | None] | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Shake hands, then read requests until the peer goes."""
        try:
            self._shake_hands()
            threading.Thread(target=self._send_all, name="kv-send", daemon=True).start()
            while True:
                header = sockets.receive_header(self.connection)
                if header.payload_bytes:
                    raise WireError(f"a {header.kind.name} frame from a decode worker carries no payload")
                if header.kind is Kind.PULL:
                    self.server.pull(header.request, self)
                elif header.kind is Kind.RELEASE:
                    self.server.release(header.request)
                else:
                    raise WireError(f"a decode worker sends PULL or RELEASE, not {header.kind.name}")
        except EOFError:
            pass
        except (WireError, OSError) as error:
            log.warning("KV peer dropped: %s", error)
        finally:
            self.outbox.put(None)
            self.server.forget(self)
            self.connection.close()

    def _shake_hands(self) -> None:
        connection, mine = self.connection, self.server.hello
        connection.settimeout(sockets.HANDSHAKE_TIMEOUT_S)
        if not sockets.same_user(connection):
            raise WireError("a process of another user connected")
        theirs = parse(Hello, sockets.receive_control(connection, Kind.HELLO))
        assert isinstance(theirs, Hello)
        if not hmac.compare_digest(theirs.token, mine.token):
            raise WireError("a peer with another cluster's token connected")
        if (reason := mine.mismatch(theirs)) is not None:
            sockets.send_control(connection, Kind.REFUSED, reason.encode())
            raise WireError(reason)
        sockets.send_control(connection, Kind.HELLO, msgspec.msgpack.encode(mine))
        if self.server.shared:
            socket.send_fds(connection, [b"\0"], [self.server.cache.fd])
        connection.settimeout(None)

    def _send_all(self) -> None:
        while (item := self.outbox.get()) is not None:
            request, offer = item
            try:
                self._send_ready(request, offer)
            except OSError:
                return  # the reading side notices too, and cleans up

    def _send_ready(self, request: int, offer: _Offer | None) -> None:
        """Send what is ready and unsent of `offer`, and READY or GONE where it is time for it."""
        if offer is None or offer.withdrawn:
            self._send_gone(request)
            return
        if offer.peer is not self:
            return
        if offer.sent < (ready := offer.ready):
            first, offer.sent = offer.sent, ready
            offer.queue_s += time.monotonic() - offer.ready_at
            self._send_blocks(request, offer, first, offer.blocks[first:ready])
        if offer.first_token is not None and offer.sent == len(offer.blocks):
            offer.sent += 1  # READY goes out once
            ready_frame = Ready(offer.prompt_tokens, offer.first_token, offer.done_at, offer.queue_s, offer.codec_s)
            with self.server._lock:  # an offer withdrawn from here on has been read completely
                withdrawn = offer.withdrawn
            if withdrawn:
                self._send_gone(request)
            else:
                payload = msgspec.msgpack.encode(ready_frame)
                sockets.send_control(self.connection, Kind.READY, payload, request=request)

    def _send_gone(self, request: int) -> None:
        reason = b"the prefill worker no longer holds this request's KV (lease ended or aborted)"
        sockets.send_control(self.connection, Kind.GONE, reason, request=request)

    def _send_blocks(self, request: int, offer: _Offer, first: int, blocks: list[int]) -> None:
        cache, geometry = self.server.cache, self.server.cache.geometry
        started = time.monotonic()
        views = [cache.block(block) for block in blocks]
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        offer.codec_s += time.monotonic() - started
        payload: list[bytes | memoryview] = [array("I", blocks).tobytes()] if self.server.shared else [*views]
        header = Header(
            Kind.BLOCKS,
            request=request,
            fingerprint=int(self.server.hello.fingerprint, 16),
            codec=Codec.RAW,
            layers=geometry.layers,
            first_block=first,
            blocks=len(blocks),
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            flags=SHARED if self.server.shared else 0,
            payload_bytes=sum(len(part) for part in payload),
            checksum=digest.intdigest(),
        )
        sockets.send(self.connection, header, payload)
