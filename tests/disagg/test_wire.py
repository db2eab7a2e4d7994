"""The hand-over's frames: what one side writes the other reads, and anything else is refused with a reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.disagg.transfer.wire import (
    DTYPES,
    HEADER_BYTES,
    VERSION,
    Codec,
    Header,
    Hello,
    Kind,
    WireError,
    decode_header,
    parse,
)

u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    request=u64,
    fingerprint=u64,
    codec=st.sampled_from(Codec),
    first_layer=u16,
    layers=u16,
    first_block=u32,
    blocks=u32,
    block_size=u32,
    dtype=st.sampled_from(DTYPES),
    flags=st.integers(0, 255),
    payload_bytes=u64,
    checksum=u64,
)


@given(headers)
def test_a_header_survives_the_wire(header: Header) -> None:
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert decode_header(data) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(header: Header, bit: int) -> None:
    data = bytearray(header.encode())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode_header(data)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_arbitrary_bytes_are_refused_never_believed(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_header(data)


def test_another_version_is_named() -> None:
    data = bytearray(Header(Kind.PULL).encode())
    data[4:6] = (VERSION + 1).to_bytes(2, "little")
    with pytest.raises(WireError, match=f"version {VERSION + 1} is not spoken here; this side speaks {VERSION}"):
        decode_header(data)


def hello(**changes: object) -> Hello:
    base = Hello("t", "h", 1, "00", 30, 3, 64, 16, "bfloat16", 10, [0])
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "ff"}, "fingerprint '00' here, 'ff' there"),
        ({"dtype": "float32"}, "dtype 'bfloat16' here, 'float32' there"),
        ({"block_size": 32}, "block_size 16 here, 32 there"),
        ({"layers": 29, "head_dim": 32}, "layers 30 here, 29 there; head_dim 64 here, 32 there"),
    ],
)
def test_a_mismatch_names_both_sides(change: dict[str, object], named: str) -> None:
    reason = hello().mismatch(hello(pid=2, **change))
    assert reason is not None and named in reason and "process 1 and process 2" in reason


@given(st.binary(max_size=200))
def test_a_malformed_control_payload_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError, match="malformed Hello"):
        parse(Hello, payload)
