"""The hand-over's wire format: a handshake, then frames with a fixed, versioned, checksummed header.

Decode side first: CHALLENGE; PROOF; PROOF (see `auth`); HELLO each way. Then PULL asks for a request's KV from a
block on; BLOCKS frames and READY, or GONE, answer it. Each frame is acknowledged (ACK), and so is the whole (LANDED);
CANCEL ends it early. HEARTBEAT names the requests whose KV must be kept.

```
offset size  field
     0    4  magic "SRKV"
     4    2  version                       little-endian throughout
     6    1  kind        (Kind)
     7    1  codec       (Codec)
     8    8  model fingerprint
    16    8  request id
    24    2  first layer
    26    2  layer count
    28    4  first block   (of the prompt, not of any worker's pool)
    32    4  block count
    36    4  block size    in tokens
    40    1  dtype         (DTYPES)
    41    1  flags         (NAMED: the payload names blocks that the reader fetches: shared memory, NIXL)
    42    2  reserved, zero
    44    8  payload bytes that follow
    52    8  xxh3-64 of the payload, or of the KV that it names
    60    4  crc32 of the 60 bytes before
```
A reader checks magic, version and header checksum before it believes a length, and lengths are bounded:
whatever a peer sends, it is refused with a reason or it is right.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from backends.disagg.engine.kv_cache import KVGeometry
from backends.disagg.transfer.codecs import Codec

VERSION = 2
MAGIC = b"SRKV"
HEADER_BYTES = 64
MAX_CONTROL_BYTES = 1 << 20
"""The longest payload of a frame that carries no KV."""
MAX_STRANGER_BYTES = 256
"""The same, from a peer that has not proved yet that it knows the cluster's secret."""
DTYPES = ("float32", "bfloat16", "float16")
NAMED = 1

_HEADER = struct.Struct("<4sHBBQQHHIIIBBHQQ")
_CRC = struct.Struct("<I")


class WireError(Exception):
    """What a peer sent cannot be trusted or used; the connection is of no more use."""


class Kind(IntEnum):
    HELLO = 1
    """Payload: Hello. What each side is, once both have proved to know the secret."""
    REFUSED = 2
    """Payload: text. The last frame on a connection whose handshake failed."""
    PULL = 3
    """Decode side: send a prompt's KV, from block `first_block` on, as it becomes ready. Payload: 8 bytes, what the
    prefill side calls it. `request` is this pull's own number, in whatever either side says of it."""
    BLOCKS = 4
    """Prefill side: KV of a block range."""
    READY = 5
    """Prefill side: all blocks were sent. Payload: Ready."""
    GONE = 6
    """Prefill side: this request's KV is not here (any more). Payload: text."""
    CANCEL = 7
    """Decode side: this request's KV is not wanted after all."""
    ACK = 8
    """Decode side: a BLOCKS frame has arrived. Payload: Ack."""
    LANDED = 9
    """Decode side: all has arrived and nothing of it is read any more."""
    HEARTBEAT = 10
    """Decode side: still at work on these. Payload: what the prefill side calls them, 8 bytes each."""
    CHALLENGE = 11
    """Whoever connects, first. Payload: a nonce."""
    PROOF = 12
    """Both sides, once. Payload: see `auth`."""


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    request: int = 0
    fingerprint: int = 0
    codec: Codec = Codec.RAW
    first_layer: int = 0
    layers: int = 0
    first_block: int = 0
    blocks: int = 0
    block_size: int = 0
    dtype: str = DTYPES[0]
    flags: int = 0
    payload_bytes: int = 0
    checksum: int = 0

    def encode(self) -> bytes:
        """The header as HEADER_BYTES bytes. Raises struct.error for a field out of range."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.codec,
            self.fingerprint,
            self.request,
            self.first_layer,
            self.layers,
            self.first_block,
            self.blocks,
            self.block_size,
            DTYPES.index(self.dtype),
            self.flags,
            0,
            self.payload_bytes,
            self.checksum,
        )
        return head + _CRC.pack(zlib.crc32(head))


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Parse and verify HEADER_BYTES bytes. Raises WireError naming what is wrong."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"a frame header is {HEADER_BYTES} bytes, got {len(data)}")
    (
        magic,
        version,
        kind,
        codec,
        fingerprint,
        request,
        first_layer,
        layers,
        first_block,
        blocks,
        block_size,
        dtype,
        flags,
        reserved,
        payload_bytes,
        checksum,
    ) = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"not a KV transfer peer: the frame starts with {bytes(magic)!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"wire format version {version} is not spoken here; this side speaks {VERSION}")
    if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(bytes(data[: _HEADER.size])):
        raise WireError("frame header checksum mismatch")
    try:
        return Header(
            Kind(kind),
            request,
            fingerprint,
            Codec(codec),
            first_layer,
            layers,
            first_block,
            blocks,
            block_size,
            DTYPES[dtype],
            flags,
            payload_bytes,
            checksum,
        )
    except (ValueError, IndexError) as error:
        raise WireError(f"frame header: {error}") from None
    finally:
        del reserved


class Hello(msgspec.Struct, frozen=True):
    """What each side says of itself."""

    incarnation: str
    """Names this life of the process: one that was started again at the same address is another."""
    host: str
    """Names the machine's clock: times of one are comparable."""
    pid: int
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    num_blocks: int
    codecs: list[int]
    """Those that it can decode."""
    nixl: bytes = b""
    """Its NIXL agent's metadata, where it is to be used."""
    base: int = 0
    """Where its blocks begin, for a NIXL read."""

    def mismatch(self, peer: Hello) -> str | None:
        """Why KV of `peer` cannot be used here, with both sides named; None where it can."""
        names = ("fingerprint", "dtype", "block_size", "layers", "kv_heads", "head_dim")
        differing = [
            f"{name} {getattr(self, name)!r} here, {getattr(peer, name)!r} there"
            for name in names
            if getattr(self, name) != getattr(peer, name)
        ]
        if not differing:
            return None
        return f"process {self.pid} and process {peer.pid} cannot share KV: " + "; ".join(differing)

    def geometry(self) -> KVGeometry:
        return KVGeometry(self.layers, self.kv_heads, self.head_dim, self.block_size, self.dtype)


class Ack(msgspec.Struct, frozen=True):
    """What a BLOCKS frame cost its receiver, in seconds."""

    codec_s: float


class Ready(msgspec.Struct, frozen=True):
    """The end of a hand-over: the prompt's length in tokens, the first token and the times of the prefill side.

    `queue_s` is how long blocks lay ready unsent.
    """

    prompt_tokens: int
    first_token: int
    prefill_done: float
    """CLOCK_MONOTONIC of the prefill host."""
    since_done_s: float
    """How long ago that was when this was sent."""
    queue_s: float
    codec_s: float


def parse(kind: type[msgspec.Struct], payload: bytes | bytearray) -> msgspec.Struct:
    """Decode a control payload. Raises WireError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed {kind.__name__}: {error}") from None
