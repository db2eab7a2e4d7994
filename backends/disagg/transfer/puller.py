"""The decode side of the hand-over: pulls prompts' KV from a prefill worker into this worker's own blocks.

One connection and one thread per prefill worker. The engine's thread calls `pull` and `cancel`; results
come back through the callbacks, on the puller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.transfer import sockets
from backends.disagg.transfer.wire import SHARED, Codec, Header, Hello, Kind, Ready, WireError, parse

log = logging.getLogger("splitroute.transfer")


@dataclass(frozen=True, slots=True)
class Landed:
    """A prompt's KV is complete in this worker's blocks. Times in seconds."""

    request: int
    first_token: int
    bytes: int
    prefill_pid: int
    queue_s: float
    wire_s: float
    codec_s: float
    exposed_s: float


@dataclass(slots=True)
class _Pull:
    blocks: list[int]
    landed: int = 0
    bytes: int = 0
    wire_s: float = 0.0
    codec_s: float = 0.0
    cancelled: bool = False


class Puller:
    """The connection to the prefill worker at `address`. Raises WireError or OSError where it is refused."""

    def __init__(
        self,
        cache: KVCache,
        hello: Hello,
        address: str,
        on_landed: Callable[[Landed], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self.cache = cache
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._pulls: dict[int, _Pull] = {}
        self.closed = False
        """The connection has ended; a new Puller may reach the same address."""
        self._connection = sockets.connect(address)
        try:
            self._shake_hands(hello)
        except BaseException:
            self._connection.close()
            raise
        size = cache.geometry.block_bytes
        self._mine = np.frombuffer(cache.bytes, dtype=np.uint8).reshape(-1, size)
        threading.Thread(target=self._read, name="kv-pull", daemon=True).start()

    def _shake_hands(self, hello: Hello) -> None:
        connection = self._connection
        sockets.send_control(connection, Kind.HELLO, msgspec.msgpack.encode(hello))
        theirs = parse(Hello, sockets.receive_control(connection, Kind.HELLO))
        assert isinstance(theirs, Hello)
        if (reason := hello.mismatch(theirs)) is not None:
            raise WireError(reason)
        self.peer = theirs
        self._theirs: np.ndarray[tuple[int, int], np.dtype[np.uint8]] | None = None
        if theirs.transport == "shm":
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if len(fds) != 1:
                raise WireError("the prefill worker did not pass its shared memory")
            size = theirs.num_blocks * theirs.geometry().block_bytes
            try:
                shared = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
            except (ValueError, OSError) as error:
                raise WireError(f"the prefill worker's shared memory cannot be mapped: {error}") from None
            finally:
                os.close(fds[0])
            self._theirs = np.frombuffer(shared, dtype=np.uint8).reshape(theirs.num_blocks, -1)
        connection.settimeout(None)

    # --- the engine's side ---------------------------------------------------------------------------

    def pull(self, request: int, blocks: list[int]) -> None:
        """Fetch `request`'s KV into `blocks`, which nobody else may touch until it landed or failed."""
        with self._lock:
            closed = self.closed
            if not closed:
                self._pulls[request] = _Pull(blocks)
        reason = "the connection to the prefill worker is closed"
        if closed:
            self._on_failed(request, reason)
        elif not self._tell(Kind.PULL, request):
            self._fail(request, reason)

    def cancel(self, request: int) -> bool:
        """Stop a pull. False where its blocks are being written this moment: `on_failed` follows soon."""
        with self._lock:
            pull = self._pulls.get(request)
            if pull is None:
                return True
            pull.cancelled = True
        self._tell(Kind.RELEASE, request)
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _tell(self, kind: Kind, request: int) -> bool:
        try:
            with self._lock:
                sockets.send_control(self._connection, kind, request=request)
        except OSError:
            return False
        return True

    def _fail(self, request: int, reason: str) -> None:
        with self._lock:
            known = self._pulls.pop(request, None) is not None
        if known:  # else it has ended already, and is told of once
            self._on_failed(request, reason)

    # --- the connection's thread ---------------------------------------------------------------------

    def _read(self) -> None:
        reason = "the prefill worker went away"
        try:
            while True:
                self._handle(sockets.receive_header(self._connection))
        except EOFError:
            pass
        except (WireError, OSError) as error:
            reason = f"the KV transfer failed: {error}"
            log.warning("%s", reason)
        with self._lock:
            self.closed = True
            left = list(self._pulls)
        self._connection.close()
        for request in left:
            self._fail(request, reason)

    def _handle(self, header: Header) -> None:
        pull = self._pulls.get(header.request)
        if header.kind is Kind.BLOCKS:
            self._take_blocks(header, pull)
            return
        payload = sockets.receive_bytes(self._connection, header.payload_bytes)
        if header.kind is Kind.READY:
            ready = parse(Ready, payload)
            assert isinstance(ready, Ready)
            self._complete(header.request, pull, ready)
        elif header.kind is Kind.GONE:
            self._fail(header.request, payload.decode(errors="replace"))
        else:
            raise WireError(f"a prefill worker sends BLOCKS, READY or GONE, not {header.kind.name}")

    def _take_blocks(self, header: Header, pull: _Pull | None) -> None:
        geometry = self.cache.geometry
        expected = (Codec.RAW, geometry.block_size, geometry.dtype, geometry.layers)
        if (header.codec, header.block_size, header.dtype, header.layers) != expected:
            raise WireError("a BLOCKS frame does not match the handshake")
        if header.fingerprint != int(self.peer.fingerprint, 16):
            raise WireError("a BLOCKS frame is of another model")
        shared = bool(header.flags & SHARED)
        if shared != (self._theirs is not None):
            raise WireError("a BLOCKS frame is of another transport than the handshake's")
        size = header.blocks * (4 if shared else geometry.block_bytes)
        if header.payload_bytes != size:
            raise WireError(f"{header.blocks} blocks are {size} bytes of payload, not {header.payload_bytes}")
        if pull is None or pull.cancelled:
            self._skip(size)
            if pull is not None:
                self._fail(header.request, "aborted")
            return
        if header.first_block != pull.landed or header.first_block + header.blocks > len(pull.blocks):
            raise WireError(f"blocks {header.first_block}+{header.blocks} are not the next of this request")
        mine = pull.blocks[header.first_block : header.first_block + header.blocks]
        started = time.monotonic()
        if shared:
            self._copy_shared(mine, size)
        else:
            for block in mine:
                sockets.receive_into(self._connection, self.cache.block(block))
        received = time.monotonic()
        digest = xxhash.xxh3_64()
        for block in mine:
            digest.update(self.cache.block(block))
        if digest.intdigest() != header.checksum:
            raise WireError(f"checksum mismatch in the KV of request {header.request}")
        self.cache.land(mine)
        pull.landed += header.blocks
        pull.bytes += header.blocks * geometry.block_bytes
        pull.wire_s += received - started
        pull.codec_s += time.monotonic() - received

    def _copy_shared(self, mine: list[int], size: int) -> None:
        assert self._theirs is not None
        theirs = array("I")
        theirs.frombytes(bytes(sockets.receive_bytes(self._connection, size)))
        if max(theirs, default=0) >= len(self._theirs):
            raise WireError("a BLOCKS frame names a block outside the shared memory")
        for to, source in zip(mine, theirs, strict=True):
            np.copyto(self._mine[to], self._theirs[source])

    def _skip(self, size: int) -> None:
        scrap = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            part = scrap[: min(size, len(scrap))]
            sockets.receive_into(self._connection, part)
            size -= len(part)

    def _complete(self, request: int, pull: _Pull | None, ready: Ready) -> None:
        if pull is None:
            return
        if pull.cancelled:
            self._fail(request, "aborted")
            return
        needed = -(-ready.prompt_tokens // self.cache.geometry.block_size)
        if pull.landed != needed:
            raise WireError(f"READY after {pull.landed} of {needed} blocks")
        with self._lock:
            del self._pulls[request]
        self._tell(Kind.RELEASE, request)
        self._on_landed(
            Landed(
                request=request,
                first_token=ready.first_token,
                bytes=pull.bytes,
                prefill_pid=self.peer.pid,
                queue_s=ready.queue_s,
                wire_s=pull.wire_s,
                codec_s=pull.codec_s + ready.codec_s,
                exposed_s=max(0.0, time.monotonic() - ready.prefill_done),
            )
        )
