"""The prefill side of the hand-over: offers prompts' KV while and after it is computed.

The engine's thread says what is ready (`offer`, `progress`, `done`, `spill`, `withdraw`); for each peer a thread reads
requests and another sends, so computing never waits for a socket. An offer outlives its first reader: where that
one dies, another may pull the same KV. Blocks belong to the engine. It moves them to host memory (`spill`) only while
nobody reads them, and frees them only after `withdraw`; READY is sent only for an offer that has not been withdrawn,
so what a decode worker accepts was never overwritten while it was read.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.transfer import auth, sockets
from backends.disagg.transfer.codecs import Chooser, Codec, encode
from backends.disagg.transfer.wire import SHARED, Ack, Header, Hello, Kind, Ready, WireError, parse

log = logging.getLogger("splitroute.transfer")

_MAX_STRANGERS = 32
"""Connections that have not proved anything yet; more are closed at once."""
_FRAME_BYTES = 4 << 20
"""A frame carries about so much KV, and one block at least: while one is sent, the next is encoded."""


@dataclass(slots=True, eq=False)
class _Reading:
    """One decode worker's pull of an offer."""

    peer: _Peer
    pull: int
    """What the reader calls it."""
    begun: float
    sent: int
    """The next block of the prompt that this reader gets."""
    queue_s: float = 0.0
    codec_s: float = 0.0
    told: bool = False
    """READY has been sent."""
    landed: bool = False


@dataclass(slots=True, eq=False)
class _Offer:
    blocks: list[int]
    prompt_tokens: int
    ready: int = 0
    """Blocks from the first whose KV is complete."""
    ready_at: float = 0.0
    first_token: int | None = None
    done_at: float = 0.0
    withdrawn: bool = False
    host: memoryview | None = None
    """All blocks one after another, where they were spilled."""
    reading: _Reading | None = None


class KVServer:
    """Serves blocks of `cache` over `transports`. `on_heartbeat(requests)` is called from a peer's thread."""

    def __init__(
        self,
        cache: KVCache,
        hello: Hello,
        secret: str,
        listeners: list[tuple[socket.socket, str]],
        on_heartbeat: Callable[[list[int]], None],
        codecs: Sequence[Codec] = (Codec.RAW,),
    ) -> None:
        """`codecs`: those that may be used, the most faithful first."""
        self.cache = cache
        self.codecs = codecs
        self.hello = hello
        self.secret = secret
        self.on_heartbeat = on_heartbeat
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._early_pulls: dict[int, _Reading] = {}
        """Pulls of what has not been offered here yet."""
        self._gone: deque[int] = deque(maxlen=4096)
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._peers: set[_Peer] = set()
        self._listeners = [listener for listener, _ in listeners]
        self.addresses = [address for _, address in listeners]
        for listener, _ in listeners:
            threading.Thread(target=self._accept, args=(listener,), name="kv-accept", daemon=True).start()

    # --- the engine's side ---------------------------------------------------------------------------

    def offer(self, request: int, blocks: list[int], prompt_tokens: int) -> None:
        """Announce that `blocks` will hold the KV of `request`'s prompt."""
        with self._lock:
            self._offers[request] = _Offer(blocks, prompt_tokens, reading=self._early_pulls.pop(request, None))

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
            self._wake(offer)

    def done(self, request: int, first_token: int) -> None:
        """All blocks are complete and the first token is known."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is not None:
                offer.first_token, offer.done_at = first_token, time.monotonic()
                self._wake(offer)

    def spill(self, request: int, save: Callable[[], memoryview]) -> bool:
        """Serve `request` from the copy that `save` makes from now on; False where its blocks are being read."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is None or offer.first_token is None or (offer.reading is not None and not offer.reading.landed):
                return False
            offer.host = save()
            return True

    def withdraw(self, request: int) -> None:
        """The blocks are about to be freed: nothing of them may be accepted any more."""
        with self._lock:
            offer = self._offers.pop(request, None)
            early = self._early_pulls.pop(request, None)
            self._gone.append(request)
            if offer is not None:
                offer.withdrawn = True
                self._wake(offer)
            elif early is not None:
                early.peer.outbox.put((None, early))

    @staticmethod
    def _wake(offer: _Offer) -> None:
        if offer.reading is not None and not offer.reading.landed:
            offer.reading.peer.outbox.put((offer, offer.reading))

    # --- the peers' side -----------------------------------------------------------------------------

    def pull(self, request: int, reading: _Reading) -> None:
        """Let `reading` have the KV of `request`; whoever had begun to read it does not go on."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is not None:
                offer.reading = reading
                self._wake(offer)
            elif request in self._gone:
                reading.peer.outbox.put((None, reading))
            else:
                self._early_pulls[request] = reading

    def ended(self, request: int, reading: _Reading) -> None:
        """Nothing is read by `reading` any more: it has landed, or is not wanted."""
        with self._lock:
            reading.landed = True
            if self._early_pulls.get(request) is reading:
                del self._early_pulls[request]

    def forget(self, peer: _Peer) -> None:
        """`peer` has gone: its offers may be pulled by another one."""
        with self._lock:
            self._peers.discard(peer)
            for offer in self._offers.values():
                if offer.reading is not None and offer.reading.peer is peer:
                    offer.reading = None
            for request in [r for r, early in self._early_pulls.items() if early.peer is peer]:
                del self._early_pulls[request]

    def is_withdrawn(self, offer: _Offer) -> bool:
        with self._lock:
            return offer.withdrawn

    def close(self) -> None:
        """Stop listening and let every peer go."""
        for listener in self._listeners:
            sockets.shut(listener)
            listener.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            sockets.shut(peer.connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=_Peer(self, connection).serve, name="kv-peer", daemon=True).start()

    def known(self, peer: _Peer | None) -> None:
        """A stranger has shown who it is, or has gone."""
        self._strangers.release()
        if peer is not None:
            with self._lock:
                self._peers.add(peer)


class _Peer:
    """One decode worker's connection."""

    def __init__(self, server: KVServer, connection: socket.socket) -> None:
        self.server = server
        self.connection = connection
        self.shared = connection.family == socket.AF_UNIX
        self.outbox: queue.SimpleQueue[tuple[_Offer | None, _Reading] | None] = queue.SimpleQueue()
        self._readings: dict[int, tuple[int, _Reading]] = {}
        """By the peer's number: what is pulled, and how far it got."""

    def serve(self) -> None:
        """The connection's life, on a thread of its own."""
        try:
            try:
                self._shake_hands()
            except BaseException:
                self.server.known(None)
                raise
            self.server.known(self)
            threading.Thread(target=self._send_all, name="kv-send", daemon=True).start()
            while True:
                self._handle(sockets.receive_header(self.connection))
        except EOFError:
            pass
        except (WireError, OSError) as error:
            log.warning("KV peer dropped: %s", error)
        finally:
            self.outbox.put(None)
            self.server.forget(self)
            self.connection.close()

    def _handle(self, header: Header) -> None:
        if header.kind is Kind.BLOCKS:
            raise WireError("a decode worker sends no BLOCKS")
        payload = sockets.receive_bytes(self.connection, header.payload_bytes)
        match header.kind:
            case Kind.PULL:
                if len(payload) != 8 or header.request in self._readings:
                    raise WireError("a PULL has a number of its own, and names a request in 8 bytes")
                request = int.from_bytes(payload, "little")
                reading = _Reading(self, header.request, time.monotonic(), header.first_block)
                self._readings[header.request] = (request, reading)
                self.server.pull(request, reading)
            case Kind.ACK:
                ack = parse(Ack, payload)
                assert isinstance(ack, Ack)
                self._chooser.arrived(ack.codec_s, time.monotonic())
            case Kind.LANDED | Kind.CANCEL:
                if (ended := self._readings.pop(header.request, None)) is not None:
                    self.server.ended(*ended)
            case Kind.HEARTBEAT:
                if len(payload) % 8:
                    raise WireError("a HEARTBEAT is ids of 8 bytes each")
                self.server.on_heartbeat(list(memoryview(payload).cast("Q")))
            case _:
                raise WireError(f"a decode worker does not send {header.kind.name}")

    def _shake_hands(self) -> None:
        connection, mine = self.connection, self.server.hello
        until = time.monotonic() + sockets.HANDSHAKE_TIMEOUT_S
        if not self.shared:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not sockets.same_user(connection):
            raise WireError("a process of another user connected")
        auth.challenge(connection, self.server.secret, until)
        theirs = parse(Hello, sockets.receive_control(connection, Kind.HELLO, until=until))
        assert isinstance(theirs, Hello)
        if (reason := mine.mismatch(theirs)) is not None:
            sockets.send_control(connection, Kind.REFUSED, reason.encode())
            raise WireError(reason)
        usable = [codec for codec in self.server.codecs if codec in theirs.codecs]
        self._chooser = Chooser(usable or [Codec.RAW])
        sockets.send_control(connection, Kind.HELLO, msgspec.msgpack.encode(mine))
        if self.shared:
            socket.send_fds(connection, [b"\0"], [self.server.cache.fd])
        connection.settimeout(None)

    def _send_all(self) -> None:
        while (item := self.outbox.get()) is not None:
            try:
                self._send_ready(*item)
            except OSError:
                return  # the reading side notices too, and cleans up

    def _send_ready(self, offer: _Offer | None, reading: _Reading) -> None:
        """Send what is ready and unsent of `offer`, and READY or GONE where it is time for it."""
        if offer is None or offer.withdrawn:
            self._send_gone(reading)
            return
        if reading.sent < offer.ready:
            reading.queue_s += time.monotonic() - max(offer.ready_at, reading.begun)
        while not reading.landed and reading.sent < (ready := offer.ready):
            first = reading.sent
            reading.sent = min(ready, first + self._frame_blocks())
            self._send_blocks(offer, reading, first)
        if offer.first_token is None or reading.sent < len(offer.blocks) or reading.told or reading.landed:
            return
        reading.told = True
        if self.server.is_withdrawn(offer):  # one withdrawn from here on has been read completely
            self._send_gone(reading)
            return
        done_at = max(offer.done_at, reading.begun)  # who came later waited for nothing before
        ready_frame = Ready(
            prompt_tokens=offer.prompt_tokens,
            first_token=offer.first_token,
            prefill_done=done_at,
            since_done_s=time.monotonic() - done_at,
            queue_s=reading.queue_s,
            codec_s=reading.codec_s,
        )
        sockets.send_control(self.connection, Kind.READY, msgspec.msgpack.encode(ready_frame), request=reading.pull)

    def _frame_blocks(self) -> int:
        """Blocks in the next frame: one where the link's speed is not known, so that it soon is."""
        if not self.shared and len(self._chooser.allowed) > 1 and self._chooser.wire_s is None:
            return 1
        return max(1, _FRAME_BYTES // self.server.cache.geometry.block_bytes)

    def _send_gone(self, reading: _Reading) -> None:
        if reading.landed:
            return
        reading.landed = True
        reason = b"the prefill worker no longer holds this request's KV (lease ended or aborted)"
        sockets.send_control(self.connection, Kind.GONE, reason, request=reading.pull)

    def _send_blocks(self, offer: _Offer, reading: _Reading, first: int) -> None:
        cache, geometry, end = self.server.cache, self.server.cache.geometry, reading.sent
        size = geometry.block_bytes
        started = time.monotonic()
        host = offer.host
        if host is None:
            views = [cache.block(block) for block in offer.blocks[first:end]]
        else:
            views = [host[at * size : (at + 1) * size] for at in range(first, end)]
        shared = self.shared and host is None
        codec, payload = (Codec.RAW, views) if shared else self._encode(views, first)
        digest = xxhash.xxh3_64()
        for view in payload:
            digest.update(view)
        if shared:
            payload = [memoryview(array("I", offer.blocks[first:end])).cast("B")]
        sent = sum(len(part) for part in payload)
        header = Header(
            Kind.BLOCKS,
            request=reading.pull,
            fingerprint=int(self.server.hello.fingerprint, 16),
            codec=codec,
            layers=geometry.layers,
            first_block=first,
            blocks=end - first,
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            flags=SHARED if shared else 0,
            payload_bytes=sent,
            checksum=digest.intdigest(),
        )
        now = time.monotonic()
        reading.codec_s += now - started
        self._chooser.sent(codec, (end - first) * size, sent, now)
        sockets.send(self.connection, header, payload)

    def _encode(self, views: list[memoryview], first: int) -> tuple[Codec, list[memoryview]]:
        """What goes over the network for these blocks."""
        codec = self._chooser.choose()
        if codec is Codec.RAW:
            return codec, views
        started, plain = time.monotonic(), sum(len(view) for view in views)
        made = encode(codec, self.server.cache.geometry, views, first=first == 0)
        if made is None:
            return Codec.RAW, views
        self._chooser.encoded(codec, plain, len(made), time.monotonic() - started)
        return codec, [made]
