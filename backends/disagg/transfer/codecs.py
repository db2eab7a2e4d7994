"""KV made smaller for slow links, and which form pays: measured, not assumed.

`raw` is the cache's own bytes. `lossless` codes exponents by their frequencies: two thirds of the size, bit for bit.
`int8` rounds to 8 bits with a scale per token and head. `near` and `small` round coarsely and code what is left by its
likelihood (codec.c says how): a third of the size at the accuracy of int8, or less than that for some loss.
docs/kv-transfer.md has the figures. Without a C compiler there is only `raw`.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from backends.disagg.engine.kv_cache import KVGeometry
from backends.disagg.engine.native import build

_SOURCE = Path(__file__).with_name("codec.c")
_INCLUDED = (Path(build.__file__).with_name("lanes.h"),)
_FLAGS = ("-ffp-contract=off",)
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class Codec(IntEnum):
    RAW = 0
    LOSSLESS = 1
    INT8 = 2
    NEAR = 3
    SMALL = 4

    @property
    def exact(self) -> bool:
        return self in (Codec.RAW, Codec.LOSSLESS)


_ALGORITHM = {Codec.LOSSLESS: 1, Codec.INT8: 2, Codec.NEAR: 3, Codec.SMALL: 3}
_FINENESS = {Codec.NEAR: 0.1, Codec.SMALL: 0.2}
"""Steps of the rounding, in the rms of a head's keys or values."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.library("codec", _SOURCE, _INCLUDED, _FLAGS)
    if library is not None:
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        library.kv_encode.argtypes = [integer, integer, pointer, *([integer] * 6), pointer, pointer, long]
        library.kv_encode.restype = long
        library.kv_decode.argtypes = [integer, integer, pointer, long, pointer, *([integer] * 6)]
    return library


def available(geometry: KVGeometry) -> list[Codec]:
    """Those that can be used here for KV of `geometry`."""
    if geometry.dtype not in _ITEM_BYTES or geometry.head_dim % 16 or _library() is None:
        return [Codec.RAW]
    return list(Codec)


def named(option: str) -> list[Codec]:
    """The codecs that a sender may use where `kv_codec` is `option`, the most faithful first."""
    if option == "auto":
        return [Codec.RAW, Codec.LOSSLESS, Codec.INT8, Codec.NEAR]
    if option == "exact":
        return [Codec.RAW, Codec.LOSSLESS]
    return [Codec[option.upper()]]


def encode(codec: Codec, geometry: KVGeometry, blocks: Sequence[memoryview], *, first: bool) -> memoryview | None:
    """`blocks` together, smaller; None where they did not become so. `first`: they begin with the prompt's first token.

    Nothing of this holds the interpreter: other threads go on.
    """
    library = _library()
    assert library is not None and codec is not Codec.RAW
    room = len(blocks) * geometry.block_bytes
    made = np.empty(room, dtype=np.uint8)
    fineness = (ctypes.c_float * 2)(*[_FINENESS.get(codec, 0.0)] * 2)
    size: int = library.kv_encode(
        _ALGORITHM[codec], *_shape(geometry, blocks), int(first), fineness, made.ctypes.data, room
    )
    return None if size < 0 else made.data[:size]


def decode(codec: Codec, geometry: KVGeometry, data: memoryview, blocks: Sequence[memoryview], *, first: bool) -> bool:
    """Write what `encode` was given into `blocks`; False where `data` cannot be that, and they hold anything."""
    library = _library()
    assert library is not None and codec is not Codec.RAW
    item_bytes, pointers, *sizes = _shape(geometry, blocks)
    done: int = library.kv_decode(
        _ALGORITHM[codec], item_bytes, _address(data), len(data), pointers, *sizes, int(first)
    )
    return done == 0


def _shape(
    geometry: KVGeometry, blocks: Sequence[memoryview]
) -> tuple[int, ctypes.Array[ctypes.c_void_p], int, int, int, int, int]:
    pointers = (ctypes.c_void_p * len(blocks))(*[_address(block) for block in blocks])
    sizes = (len(blocks), geometry.layers, geometry.kv_heads, geometry.block_size, geometry.head_dim)
    return (_ITEM_BYTES[geometry.dtype], pointers, *sizes)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address


_RATE = 0.3
_WORTH = {True: 0.9, False: 0.6}
"""Another codec is taken where it is expected to need this share of the time, or less; by whether it is exact."""
_RECENT = 4
"""Telling frames whose fastest counts as the link's speed: what else keeps a frame passes."""
_TELLING_BYTES = 100_000
"""Smaller frames say more of the latency than of the speed."""


@dataclass(slots=True)
class _Known:
    """What a codec did to the frames so far."""

    ratio: float
    encode_s: float
    """Per byte of KV, as the next."""
    decode_s: float


@dataclass(frozen=True, slots=True)
class _Sent:
    codec: Codec
    plain: int
    size: int
    at: float


class Chooser:
    """The codec of one pair's next frame, from what became of those before it.

    `allowed`: raw first, the lossy ones last. Frames are acknowledged in the order they are sent in.
    """

    def __init__(self, allowed: Sequence[Codec]) -> None:
        self.allowed = allowed
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds per byte on the wire, of the last telling frames."""
        self._under_way: deque[_Sent] = deque()
        self._acknowledged_at = 0.0
        self._known = {
            Codec.RAW: _Known(1.0, 1e-10, 2e-10),
            Codec.LOSSLESS: _Known(1.4, 2.5e-9, 2.2e-9),
            Codec.INT8: _Known(1.9, 0.5e-9, 0.2e-9),
            Codec.NEAR: _Known(2.8, 1.4e-9, 1.2e-9),
            Codec.SMALL: _Known(3.4, 1.2e-9, 1.1e-9),
        }

    def choose(self) -> Codec:
        """The first of those allowed that no other beats clearly: encoding, wire and decoding overlap from frame to
        frame, so what counts is the slowest of them, and a little of the others."""
        best = self.allowed[0]
        if self.wire_s is None:
            return best
        for codec in self.allowed[1:]:
            if self._cost(codec, self.wire_s) < _WORTH[codec.exact] * self._cost(best, self.wire_s):
                best = codec
        return best

    @property
    def wire_s(self) -> float | None:
        """Seconds per byte on the wire; None until two frames have told."""
        return min(self._recent) if len(self._recent) > 1 else None

    def _cost(self, codec: Codec, wire_s: float) -> float:
        known = self._known[codec]
        wire_s /= known.ratio
        return max(wire_s, known.encode_s, known.decode_s) + 0.2 * (wire_s + known.encode_s + known.decode_s)

    def encoded(self, codec: Codec, plain: int, size: int, seconds: float) -> None:
        """`plain` bytes of KV became `size` in so long."""
        known = self._known[codec]
        known.ratio += _RATE * (plain / size - known.ratio)
        known.encode_s += _RATE * (seconds / plain - known.encode_s)

    def sent(self, codec: Codec, plain: int, size: int, now: float) -> None:
        """The frame begins to go out."""
        self._under_way.append(_Sent(codec, plain, size, now))

    def arrived(self, decode_s: float, now: float) -> None:
        """The longest under way was received, and decoded in so long."""
        if not self._under_way:
            return
        frame = self._under_way.popleft()
        alone = frame.at >= self._acknowledged_at
        took = now - max(frame.at, self._acknowledged_at)
        self._acknowledged_at = now
        known = self._known[frame.codec]
        known.decode_s += _RATE * (decode_s / frame.plain - known.decode_s)
        # One that came right behind another was on the wire while that one was decoded.
        per_byte = max(0.0, took - decode_s if alone else took) / frame.size
        if frame.size >= _TELLING_BYTES:
            self._recent.append(per_byte)
