"""The decode side of the hand-over: pulls prompts' KV from a prefill worker into this worker's own blocks.

One connection and one thread per prefill worker. The engine's thread calls `pull`, `cancel` and `heartbeat`, none of
which waits for the peer; results come back through the callbacks, on the puller's thread. Bytes from the network are
received beside the cache and copied into it: so a pull can be cancelled, and its blocks given to others, at any
moment, whatever the peer does.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import ssl
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.transfer import auth, sockets
from backends.disagg.transfer.codecs import Codec, decode
from backends.disagg.transfer.nixl import Nixl, NixlError, Reader
from backends.disagg.transfer.peer import FRAME_BYTES
from backends.disagg.transfer.sockets import Connection
from backends.disagg.transfer.wire import NAMED, Ack, Header, Hello, Kind, Ready, WireError, parse

log = logging.getLogger("splitroute.transfer")


@dataclass(frozen=True, slots=True)
class Landed:
    """A prompt's KV is complete in this worker's blocks. Times in seconds."""

    pull: int
    first_token: int
    bytes: int
    transport: str
    """`shm`, `tcp` or `nixl`."""
    codec: str
    exact: bool
    """Bit for bit what the prefill worker computed."""
    prefill_pid: int
    queue_s: float
    wire_s: float
    codec_s: float
    exposed_s: float


@dataclass(slots=True)
class _Pull:
    blocks: list[int]
    landed: int
    """Blocks from the first that are here."""
    bytes: int = 0
    wire_s: float = 0.0
    codec_s: float = 0.0
    codecs: set[Codec] = field(default_factory=set)


class Puller:
    """The connection to the prefill worker at `address`, in its life `incarnation`. It is opened on the puller's own
    thread; where that fails, so do the pulls."""

    def __init__(
        self,
        cache: KVCache,
        hello: Hello,
        secret: str,
        address: str,
        incarnation: str,
        on_landed: Callable[[Landed], None],
        on_failed: Callable[[int, str], None],
        nixl: Nixl | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.cache = cache
        self._hello = hello
        self._secret = secret
        self._nixl = nixl
        self._tls = tls
        self._reader: Reader | None = None
        self.address = address
        self.incarnation = incarnation
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._pulls: dict[int, _Pull] = {}
        self.closed = False
        """The connection has ended; a new Puller may reach the same address."""
        self._connection: Connection | None = None
        self._why = "the connection to the prefill worker is closed"
        self._unsent: list[tuple[Kind, int, int, bytes]] = []
        """What to say once the connection is there."""
        size = cache.geometry.block_bytes
        self._mine = np.frombuffer(cache.bytes, dtype=np.uint8).reshape(-1, size)
        self._buffers: dict[str, memoryview] = {}
        self._theirs: np.ndarray[tuple[int, int], np.dtype[np.uint8]] | None = None
        threading.Thread(target=self._run, name="kv-pull", daemon=True).start()

    # --- the engine's side ---------------------------------------------------------------------------

    def pull(self, pull: int, request: int, blocks: list[int], first_block: int = 0) -> None:
        """Fetch what the peer calls `request` into `blocks`, from the one numbered `first_block` on.

        Nobody else may touch these until it landed, failed or was cancelled. `pull` is its number here, used once.
        """
        with self._lock:
            closed = self.closed
            if not closed:
                self._pulls[pull] = _Pull(blocks, first_block)
                self._tell(Kind.PULL, pull, first_block, request.to_bytes(8, "little"))
        if closed:
            self._on_failed(pull, self._why)

    def cancel(self, pull: int) -> None:
        """Stop a pull: when this returns, its blocks are written no more, and nothing will be told of it."""
        with self._lock:
            if self._pulls.pop(pull, None) is not None:
                self._tell(Kind.CANCEL, pull)

    def heartbeat(self, requests: Sequence[int]) -> None:
        """Let the peer keep the KV of `requests`."""
        with self._lock:
            self._tell(Kind.HEARTBEAT, payload=array("Q", requests).tobytes())

    def close(self) -> None:
        with self._lock:
            self.closed = True
            if self._connection is not None:
                sockets.shut(self._connection)

    def _tell(self, kind: Kind, request: int = 0, first_block: int = 0, payload: bytes = b"") -> None:
        """Send a frame, under the lock. Where the connection is broken, the reading thread notices as well."""
        if self._connection is None:
            self._unsent.append((kind, request, first_block, payload))
            return
        header = Header(kind, request=request, first_block=first_block, payload_bytes=len(payload))
        try:
            sockets.send(self._connection, header, (payload,) if payload else ())
        except OSError:
            sockets.shut(self._connection)

    # --- the connection's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the prefill worker went away"
        connection: Connection | None = None
        try:
            connection = sockets.connect(self.address, self._tls)
            self._shake_hands(connection)
            with self._lock:
                self._connection = connection
                for said in self._unsent:
                    self._tell(*said)
                self._unsent.clear()
                closed = self.closed
            while not closed:
                self._handle(connection, sockets.receive_header(connection))
        except EOFError:
            pass
        except (WireError, OSError, NixlError) as error:
            reason = f"the KV transfer failed: {error}"
            log.warning("%s", reason)
        with self._lock:
            self.closed, self._why = True, reason
            left = list(self._pulls)
            self._pulls.clear()
        self._theirs = None  # or a dead worker's memory would stay as long as this one lives
        if connection is not None:
            connection.close()
        if self._reader is not None:
            self._reader.forget()
        for pull in left:
            self._on_failed(pull, reason)

    def _shake_hands(self, connection: Connection) -> None:
        until = time.monotonic() + sockets.HANDSHAKE_TIMEOUT_S
        auth.prove_to_listener(connection, self._secret, until)
        sockets.send_control(connection, Kind.HELLO, msgspec.msgpack.encode(self._hello))
        theirs = parse(Hello, sockets.receive_control(connection, Kind.HELLO, until=until))
        assert isinstance(theirs, Hello)
        if (reason := self._hello.mismatch(theirs)) is not None:
            raise WireError(reason)
        if theirs.incarnation != self.incarnation:
            raise WireError("the prefill worker was started again: what it held is gone")
        self.peer = theirs
        if not isinstance(connection, socket.socket):
            pass
        elif connection.family == socket.AF_UNIX:
            self._map(connection, theirs)
        elif self._nixl is not None and theirs.nixl:
            most = max(1, FRAME_BYTES // self.cache.geometry.block_bytes)
            self._reader = self._nixl.reader(theirs.nixl, theirs.base, most)
            # Now, not when the first prompt waits for it: NIXL connects with the first read.
            self._reader.read([0], lambda: _open(connection))
            sockets.send_control(connection, Kind.ACK, msgspec.msgpack.encode(Ack(0.0)))
        connection.settimeout(None)

    def _map(self, connection: socket.socket, theirs: Hello) -> None:
        """Take the peer's cache as shared memory."""
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if len(fds) != 1:
            raise WireError("the prefill worker did not pass its shared memory")
        size = theirs.num_blocks * theirs.geometry().block_bytes
        try:
            # All of its pages now: one by one they would cost more than the copying.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            shared = mmap.mmap(fds[0], size, flags=flags, prot=mmap.PROT_READ)
        except (ValueError, OSError) as error:
            raise WireError(f"the prefill worker's shared memory cannot be mapped: {error}") from None
        finally:
            os.close(fds[0])
        self._theirs = np.frombuffer(shared, dtype=np.uint8).reshape(theirs.num_blocks, -1)

    def _handle(self, connection: Connection, header: Header) -> None:
        if header.kind is Kind.BLOCKS:
            self._take_blocks(connection, header)
            return
        payload = sockets.receive_bytes(connection, header.payload_bytes)
        if header.kind is Kind.READY:
            ready = parse(Ready, payload)
            assert isinstance(ready, Ready)
            self._complete(header.request, ready)
        elif header.kind is Kind.GONE:
            with self._lock:
                known = self._pulls.pop(header.request, None)
            if known is not None:
                self._on_failed(header.request, payload.decode(errors="replace"))
        else:
            raise WireError(f"a prefill worker does not send {header.kind.name}")

    def _take_blocks(self, connection: Connection, header: Header) -> None:
        named = self._check(header)
        pull = self._pulls.get(header.request)
        if pull is None:  # cancelled
            self._skip(connection, header.payload_bytes)
            return
        if header.first_block != pull.landed or header.first_block + header.blocks > len(pull.blocks):
            raise WireError(f"blocks {header.first_block}+{header.blocks} are not the next of this request")
        mine = pull.blocks[header.first_block : header.first_block + header.blocks]
        started = time.monotonic()
        if named:
            sources = self._named_blocks(connection, header)
            received = time.monotonic()
        else:
            payload = self._buffer("received", header.payload_bytes)
            sockets.receive_into(connection, payload)
            received = time.monotonic()
            if xxhash.xxh3_64_intdigest(payload) != header.checksum:
                raise WireError(f"checksum mismatch in the KV of pull {header.request}")
            sources = self._decode(header, payload)
        digest = xxhash.xxh3_64()
        for block, source in zip(mine, sources, strict=True):
            with self._lock:
                if self._pulls.get(header.request) is not pull:
                    return  # cancelled; its blocks are somebody else's
                np.copyto(self._mine[block], source)
                if named:  # what was copied, not what may have become of it since
                    digest.update(self._mine[block])
        with self._lock:
            if self._pulls.get(header.request) is not pull:
                return
            if named and digest.intdigest() != header.checksum:
                raise WireError(f"checksum mismatch in the KV of pull {header.request}")
            self.cache.land(mine)
            codec_s = time.monotonic() - received
            pull.landed += header.blocks
            pull.bytes += header.blocks * self.cache.geometry.block_bytes
            pull.wire_s += received - started
            pull.codec_s += codec_s
            pull.codecs.add(header.codec)
            self._tell(Kind.ACK, header.request, 0, msgspec.msgpack.encode(Ack(codec_s)))

    def _check(self, header: Header) -> bool:
        """Whether a BLOCKS frame only names its blocks. Raises WireError where it cannot be right."""
        geometry = self.cache.geometry
        expected = (geometry.block_size, geometry.dtype, geometry.layers)
        if (header.block_size, header.dtype, header.layers) != expected or header.codec not in self._hello.codecs:
            raise WireError("a BLOCKS frame does not match the handshake")
        if header.fingerprint != int(self.peer.fingerprint, 16):
            raise WireError("a BLOCKS frame is of another model")
        named = bool(header.flags & NAMED)
        if named and (self._transport == "tcp" or header.codec is not Codec.RAW):
            raise WireError("a BLOCKS frame is of another transport than the handshake's")
        most = header.blocks * geometry.block_bytes
        size = header.blocks * 4 if named else most if header.codec is Codec.RAW else header.payload_bytes
        if header.payload_bytes != size or size > most:
            raise WireError(f"{header.blocks} blocks are {size} bytes of payload, not {header.payload_bytes}")
        return named

    @property
    def _transport(self) -> str:
        return "shm" if self._theirs is not None else "nixl" if self._reader is not None else "tcp"

    def _decode(self, header: Header, payload: memoryview) -> list[np.ndarray]:
        """The blocks of a frame that was received."""
        geometry, size = self.cache.geometry, self.cache.geometry.block_bytes
        if header.codec is not Codec.RAW:
            plain = self._buffer("decoded", header.blocks * size)
            blocks = [plain[at * size : (at + 1) * size] for at in range(header.blocks)]
            if not decode(header.codec, geometry, payload, blocks, first=header.first_block == 0):
                raise WireError(f"malformed {header.codec.name} in the KV of pull {header.request}")
            payload = plain
        return list(np.frombuffer(payload, dtype=np.uint8).reshape(header.blocks, size))

    def _buffer(self, name: str, size: int) -> memoryview:
        """`size` bytes to work in, kept for the next frame."""
        if len(self._buffers.get(name, b"")) < size:
            self._buffers[name] = memoryview(bytearray(size))
        return self._buffers[name][:size]

    def _named_blocks(self, connection: Connection, header: Header) -> list[np.ndarray]:
        theirs = array("I")
        theirs.frombytes(bytes(sockets.receive_bytes(connection, header.payload_bytes)))
        if max(theirs, default=0) >= self.peer.num_blocks:
            raise WireError("a BLOCKS frame names a block outside the peer's cache")
        if self._theirs is not None:
            return [self._theirs[index] for index in theirs]
        assert self._reader is not None and isinstance(connection, socket.socket)
        if len(theirs) > self._reader.most:
            raise WireError(f"a BLOCKS frame names {len(theirs)} blocks, more than are read at once")
        return self._reader.read(theirs, lambda: _open(connection))

    @staticmethod
    def _skip(connection: Connection, size: int) -> None:
        scrap = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            part = scrap[: min(size, len(scrap))]
            sockets.receive_into(connection, part)
            size -= len(part)

    def _complete(self, number: int, ready: Ready) -> None:
        with self._lock:
            pull = self._pulls.pop(number, None)
            if pull is None:
                return
            needed = -(-ready.prompt_tokens // self.cache.geometry.block_size)
            if pull.landed != needed:
                self._pulls[number] = pull  # it fails with the connection
                raise WireError(f"READY after {pull.landed} of {needed} blocks")
            self._tell(Kind.LANDED, number)
        self._on_landed(
            Landed(
                pull=number,
                first_token=ready.first_token,
                bytes=pull.bytes,
                transport=self._transport,
                codec="+".join(codec.name.lower() for codec in sorted(pull.codecs)) or "raw",
                exact=all(codec.exact for codec in pull.codecs),
                prefill_pid=self.peer.pid,
                queue_s=ready.queue_s,
                wire_s=pull.wire_s,
                codec_s=pull.codec_s + ready.codec_s,
                exposed_s=max(0.0, time.monotonic() - ready.prefill_done)
                if self.peer.host == self._hello.host
                else ready.since_done_s,
            )
        )


def _open(connection: socket.socket) -> bool:
    """Whether the peer still holds its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        return not poll.poll(0) or bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
