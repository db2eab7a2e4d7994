"""One decode worker's connection, as the prefill side serves it: a thread reads what it asks, another sends."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from array import array
from typing import TYPE_CHECKING

import msgspec
import xxhash

from backends.disagg.tls import TLSConnection
from backends.disagg.transfer import auth, sockets
from backends.disagg.transfer.codecs import Chooser, Codec, encode
from backends.disagg.transfer.nixl import POLL_S
from backends.disagg.transfer.offers import Offer, Reading
from backends.disagg.transfer.sockets import Connection
from backends.disagg.transfer.wire import NAMED, Ack, Header, Hello, Kind, Ready, WireError, parse

if TYPE_CHECKING:
    from backends.disagg.transfer.nixl import Nixl
    from backends.disagg.transfer.server import KVServer

log = logging.getLogger("splitroute.transfer")

FRAME_BYTES = 4 << 20
"""A frame carries about so much KV, and one block at least: while one is sent, the next is encoded."""


class Peer:
    """One decode worker's connection."""

    def __init__(self, server: KVServer, connection: socket.socket) -> None:
        self.server = server
        self.connection: Connection = connection
        self.shared = connection.family == socket.AF_UNIX
        self.nixl: Nixl | None = None
        """Where this peer reads blocks that way."""
        self.outbox: queue.SimpleQueue[tuple[Offer | None, Reading] | None] = queue.SimpleQueue()
        self._warming = False
        """It is making its NIXL connection."""
        self._readings: dict[int, tuple[int, Reading]] = {}
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
                reading = Reading(self, header.request, time.monotonic(), header.first_block)
                self._readings[header.request] = (request, reading)
                self.server.pull(request, reading)
            case Kind.ACK:
                ack = parse(Ack, payload)
                assert isinstance(ack, Ack)
                self._chooser.arrived(ack.codec_s, time.monotonic())
                if (known := self._readings.get(header.request)) is not None:
                    known[1].unfetched -= 1
                elif not header.request:
                    self._warming = False
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
        raw, mine = self.connection, self.server.hello
        assert isinstance(raw, socket.socket)
        until = time.monotonic() + sockets.HANDSHAKE_TIMEOUT_S
        if not self.shared:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.server.tls is not None:
                raw.settimeout(sockets.HANDSHAKE_TIMEOUT_S)
                self.connection = TLSConnection(raw, self.server.tls)
        elif not sockets.same_user(raw):
            raise WireError("a process of another user connected")
        connection = self.connection
        auth.challenge(connection, self.server.secret, until)
        theirs = parse(Hello, sockets.receive_control(connection, Kind.HELLO, until=until))
        assert isinstance(theirs, Hello)
        if (reason := mine.mismatch(theirs)) is not None:
            sockets.send_control(connection, Kind.REFUSED, reason.encode())
            raise WireError(reason)
        usable = [codec for codec in self.server.codecs if codec in theirs.codecs]
        self._chooser = Chooser(usable or [Codec.RAW])
        if not self.shared and theirs.nixl and mine.nixl:
            self.nixl = self.server.nixl
            self._warming = True
        sockets.send_control(connection, Kind.HELLO, msgspec.msgpack.encode(mine))
        if self.shared:
            socket.send_fds(raw, [b"\0"], [self.server.cache.fd])
        connection.settimeout(None)

    def _send_all(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._send_ready(*item)
            except OSError:
                return  # the reading side notices too, and cleans up

    def _next(self) -> tuple[Offer | None, Reading] | None:
        """What is to be sent next; until then, what the peer reads over NIXL goes on."""
        while (nixl := self.nixl) is not None and self.outbox.empty():
            if not self._warming and not any(reading.unfetched > 0 for _, reading in list(self._readings.values())):
                break
            nixl.progress()
            time.sleep(POLL_S)
        return self.outbox.get()

    def _send_ready(self, offer: Offer | None, reading: Reading) -> None:
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
        if not self.shared and self.nixl is None and len(self._chooser.allowed) > 1 and self._chooser.wire_s is None:
            return 1
        return max(1, FRAME_BYTES // self.server.cache.geometry.block_bytes)

    def _send_gone(self, reading: Reading) -> None:
        if reading.landed:
            return
        reading.landed = True
        reason = b"the prefill worker no longer holds this request's KV (lease ended or aborted)"
        sockets.send_control(self.connection, Kind.GONE, reason, request=reading.pull)

    def _send_blocks(self, offer: Offer, reading: Reading, first: int) -> None:
        cache, geometry, end = self.server.cache, self.server.cache.geometry, reading.sent
        size = geometry.block_bytes
        started = time.monotonic()
        host = offer.host
        if host is None:
            views = [cache.block(block) for block in offer.blocks[first:end]]
        else:
            views = [host[at * size : (at + 1) * size] for at in range(first, end)]
        named = (self.shared or self.nixl is not None) and host is None
        codec, payload = (Codec.RAW, views) if named else self._encode(views, first)
        digest = xxhash.xxh3_64()
        for view in payload:
            digest.update(view)
        if named:
            reading.unfetched += 1
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
            flags=NAMED if named else 0,
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
