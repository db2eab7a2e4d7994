"""KV made smaller for slow links: what comes out is what went in, as nearly as was said, whatever is in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.disagg.engine.kv_cache import KVGeometry
from backends.disagg.engine.native import build
from backends.disagg.transfer import codecs
from backends.disagg.transfer.codecs import Chooser, Codec, available, decode, encode

GEOMETRY = {
    dtype: KVGeometry(layers=3, kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    for dtype in ("bfloat16", "float32")
}
SMALLER = [codec for codec in Codec if codec is not Codec.RAW]
ERROR = {Codec.LOSSLESS: 0.0, Codec.INT8: 0.02, Codec.NEAR: 0.06, Codec.SMALL: 0.12}
"""Of the largest rms of a head, as far as any value may move."""

pytestmark = pytest.mark.skipif(
    len(available(GEOMETRY["bfloat16"])) == 1, reason="no C compiler here, so KV goes as it is"
)


def made_up(dtype: str, blocks: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Channels of very different size and mean, as real keys have."""
    geometry, random = GEOMETRY[dtype], torch.Generator().manual_seed(seed)
    shape = (blocks, geometry.layers, 2, geometry.kv_heads, geometry.block_size, geometry.head_dim)
    channel = (1, geometry.layers, 2, geometry.kv_heads, 1, geometry.head_dim)
    spread, mean = torch.randn(channel, generator=random).exp(), torch.randn(channel, generator=random) * 3
    return ((torch.randn(shape, generator=random) * spread + mean) * scale).to(geometry.torch_dtype)


def blocks_of(kv: torch.Tensor) -> list[memoryview]:
    flat = kv.view(torch.uint8).numpy().reshape(kv.shape[0], -1)
    return [row.data for row in flat]


def there_and_back(codec: Codec, kv: torch.Tensor, *, first: bool) -> tuple[torch.Tensor, int]:
    geometry = GEOMETRY[str(kv.dtype).removeprefix("torch.")]
    made = encode(codec, geometry, blocks_of(kv), first=first)
    assert made is not None
    got = torch.zeros_like(kv)
    assert decode(codec, geometry, made, blocks_of(got), first=first)
    return got, len(made)


@pytest.mark.parametrize("codec", SMALLER)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@given(blocks=st.integers(2, 6), seed=st.integers(0, 99), first=st.booleans(), scale=st.sampled_from([1e-6, 1.0, 1e6]))
@settings(deadline=None, max_examples=25)
def test_values_come_back_as_near_as_the_codec_says(
    codec: Codec, dtype: str, blocks: int, seed: int, first: bool, scale: float
) -> None:
    kv = made_up(dtype, blocks, seed, scale)
    got, size = there_and_back(codec, kv, first=first)
    assert size < kv.numel() * kv.element_size()
    apart = (got.double() - kv.double()).abs().amax()
    assert apart <= ERROR[codec] * kv.double().pow(2).mean((0, 4), keepdim=True).sqrt().amax() * 6 / 2
    if first:
        assert codec is Codec.INT8 or torch.equal(got[0, ..., 0, :], kv[0, ..., 0, :]), "the first token is exact"
    if codec.exact:
        assert torch.equal(got, kv)


@pytest.mark.parametrize("codec", SMALLER)
def test_any_bits_at_all_survive_without_loss_or_are_left_alone(codec: Codec) -> None:
    """Infinities, NaNs, zeros and denormals: bit for bit, or None (and they go raw); never something else."""
    bits = torch.randint(-(1 << 15), 1 << 15, made_up("bfloat16", 2, 0).shape, dtype=torch.int16)
    kv = bits.view(torch.bfloat16)
    made = encode(codec, GEOMETRY["bfloat16"], blocks_of(kv), first=False)
    if made is not None:
        assert codec is Codec.LOSSLESS
        got = torch.zeros_like(bits)
        assert decode(codec, GEOMETRY["bfloat16"], made, blocks_of(got.view(torch.bfloat16)), first=False)
        assert torch.equal(got, bits)


@pytest.mark.parametrize("codec", [Codec.NEAR, Codec.SMALL])
def test_nothing_but_zeros_and_one_enormous_value(codec: Codec) -> None:
    kv = torch.zeros_like(made_up("bfloat16", 3, 0))
    assert torch.equal(there_and_back(codec, kv, first=True)[0], kv)
    kv[1, 2, 0, 1, 5, 7] = 1e9
    got, _ = there_and_back(codec, kv, first=True)
    assert abs(got[1, 2, 0, 1, 5, 7].item() / 1e9 - 1) < 0.02


@pytest.mark.parametrize("codec", SMALLER)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_whatever_arrives_instead_is_refused_or_decoded_within_bounds(codec: Codec, data: st.DataObject) -> None:
    """A malformed payload from a peer: no read or write outside, no endless loop; a cut one is always noticed."""
    kv = made_up("bfloat16", 2, 1)
    made = encode(codec, GEOMETRY["bfloat16"], blocks_of(kv), first=True)
    assert made is not None
    frame = bytearray(made)
    for _ in range(data.draw(st.integers(0, 8))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(frame)), st.integers(0, len(frame) - 1)))
    around = torch.zeros(4, *kv.shape[1:], dtype=kv.dtype)
    fine = decode(codec, GEOMETRY["bfloat16"], memoryview(frame)[:cut], blocks_of(around)[1:3], first=True)
    assert not around[[0, 3]].view(torch.int16).any(), "the neighbours are untouched"
    assert not fine or cut == len(frame)


def test_geometries_the_codecs_do_not_know_go_raw() -> None:
    odd = KVGeometry(layers=2, kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")
    assert available(odd) == [Codec.RAW]
    half = KVGeometry(layers=2, kv_heads=1, head_dim=64, block_size=16, dtype="float16")
    assert available(half) == [Codec.RAW]


def test_without_a_compiler_there_is_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_library", lambda: None)
    assert available(GEOMETRY["bfloat16"]) == [Codec.RAW]


def drive(chooser: Chooser, bytes_per_s: float, frames: int, plain: int = 4 << 20) -> Codec:
    """Send frames over an imagined link, one after another; the codec of the last."""
    now, codec = 0.0, Codec.RAW
    for _ in range(frames):
        codec = chooser.choose()
        known = chooser._known[codec]
        size = int(plain / known.ratio)
        chooser.encoded(codec, plain, size, known.encode_s * plain)
        now += known.encode_s * plain
        chooser.sent(codec, plain, size, now)
        now += size / bytes_per_s + known.decode_s * plain
        chooser.arrived(known.decode_s * plain, now)
    return codec


@pytest.mark.parametrize(
    ("bits_per_s", "expected"), [(100e6, Codec.NEAR), (1e9, Codec.NEAR), (40e9, Codec.RAW), (400e9, Codec.RAW)]
)
def test_the_codec_follows_the_link(bits_per_s: float, expected: Codec) -> None:
    chooser = Chooser([Codec.RAW, Codec.LOSSLESS, Codec.INT8, Codec.NEAR])
    assert chooser.choose() is Codec.RAW, "nothing is known of the link yet"
    assert drive(chooser, bits_per_s / 8, 3) is expected, "two frames tell"
    assert drive(chooser, bits_per_s / 8, 20) is expected


def test_the_codec_changes_back_when_the_link_is_fast_again() -> None:
    chooser = Chooser([Codec.RAW, Codec.LOSSLESS, Codec.INT8, Codec.NEAR])
    assert drive(chooser, 12.5e6, 5) is Codec.NEAR
    assert drive(chooser, 5e9, 30) is Codec.RAW


def test_no_loss_is_taken_where_none_is_allowed() -> None:
    assert drive(Chooser([Codec.RAW, Codec.LOSSLESS]), 12.5e6, 5) is Codec.LOSSLESS


def test_small_frames_say_nothing_of_the_speed() -> None:
    chooser = Chooser([Codec.RAW, Codec.NEAR])
    drive(chooser, 1e4, 5, plain=10_000)
    assert chooser.wire_s is None


def test_a_frame_is_the_same_whatever_the_processor() -> None:
    """Sender and receiver may be different machines: the vector code and the plain C give the same bytes."""
    plain = build.library("codec", codecs._SOURCE, codecs._INCLUDED, (*codecs._FLAGS, "-mno-avx512f"))
    if plain is None:
        pytest.skip("this compiler does not take -mno-avx512f")
    fast = codecs._library()
    assert fast is not None
    plain.kv_encode.argtypes, plain.kv_encode.restype = fast.kv_encode.argtypes, fast.kv_encode.restype
    plain.kv_decode.argtypes = fast.kv_decode.argtypes
    kv = made_up("bfloat16", 3, 7)
    for codec in SMALLER:
        made = encode(codec, GEOMETRY["bfloat16"], blocks_of(kv), first=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codecs, "_library", lambda: plain)
            assert encode(codec, GEOMETRY["bfloat16"], blocks_of(kv), first=True) == made
            got = torch.zeros_like(kv)
            assert made is not None and decode(codec, GEOMETRY["bfloat16"], made, blocks_of(got), first=True)
        assert torch.equal(got, there_and_back(codec, kv, first=True)[0])
