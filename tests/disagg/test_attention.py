"""Paged attention: the compiled kernel, the torch version and plain attention agree; batches change nothing."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from backends.disagg.engine import native
from backends.disagg.engine.attention import ChunkSpan, DecodeRows, TorchAttention
from backends.disagg.engine.kv_cache import KVCache, KVGeometry
from backends.disagg.engine.native.runner import cache_struct

BLOCK = 16


def filled_cache(dtype: str, kv_heads: int = 3, head_dim: int = 64) -> KVCache:
    torch.manual_seed(0)
    cache = KVCache(KVGeometry(2, kv_heads, head_dim, BLOCK, dtype), 40, torch.device("cpu"))
    cache.data.copy_(torch.randn(cache.data.shape))
    return cache


def plain(cache: KVCache, q: torch.Tensor, layer: int, table: list[int], length: int, first: int = 0) -> torch.Tensor:
    """Attention of one query token over the tokens `first` to `length`, in float64."""
    heads = q.shape[0]
    keys, values = (
        cache.data[table, layer, which].transpose(1, 2).flatten(0, 1)[first:length].double() for which in (0, 1)
    )
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        q.double()[:, None], keys.transpose(0, 1), values.transpose(0, 1), scale=q.shape[-1] ** -0.5
    )
    return out[:, 0]


def rows_of(tables: list[list[int]], lengths: list[int]) -> DecodeRows:
    widest = max(map(len, tables))
    padded = torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32)
    return DecodeRows(0, padded, torch.tensor(lengths, dtype=torch.int32))


class NativeDecode:
    """The compiled kernel, with `TorchAttention.decode`'s face."""

    def __init__(self, cache: KVCache, library: ctypes.CDLL, window: int | None = None) -> None:
        self.cache, self.window, self.struct = cache, window, cache_struct(cache)
        self.kernel = getattr(
            library, {"float32": "paged_decode_f32", "bfloat16": "paged_decode_bf16"}[cache.geometry.dtype]
        )

    def decode(self, q: torch.Tensor, layer: int, rows: DecodeRows, windowed: bool = False) -> torch.Tensor:
        geometry = self.cache.geometry
        out = torch.full_like(q, torch.nan)
        failed = self.kernel(
            q.contiguous().data_ptr(),
            self.cache.data[0, layer].data_ptr(),
            ctypes.byref(self.struct),
            rows.tables.data_ptr(),
            rows.tables.shape[1],
            rows.lengths.data_ptr(),
            out.data_ptr(),
            q.shape[0],
            q.shape[1] // geometry.kv_heads,
            geometry.head_dim**-0.5,
            (self.window or 0) if windowed else 0,
            torch.get_num_threads(),
        )
        assert not failed
        return out


def implementations(cache: KVCache, window: int | None = None) -> list[TorchAttention | NativeDecode]:
    library = native.load()
    found: list[TorchAttention | NativeDecode] = [TorchAttention(cache, window=window)]
    return [*found, NativeDecode(cache, library, window)] if library else found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80), (10, 2, 128)])
def test_decode_attends_to_exactly_the_rows_own_tokens(dtype: str, heads: int, kv_heads: int, head_dim: int) -> None:
    cache = filled_cache(dtype, kv_heads, head_dim)
    tables = [[3], [7, 1], [30, 2, 39, 11], [5]]
    lengths = [1, 17, 64, 16]
    q = torch.randn(4, heads, head_dim).to(cache.data.dtype)
    for attention in implementations(cache):
        out = attention.decode(q, 1, rows_of(tables, lengths))
        for row in range(4):
            expected = plain(cache, q[row], 1, tables[row], lengths[row])
            tolerance = 1e-5 if dtype == "float32" else 2e-2
            torch.testing.assert_close(out[row].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 33, 1000])
def test_a_sliding_window_ends_with_the_rows_own_token(window: int) -> None:
    cache = filled_cache("float32")
    tables, lengths = [[7, 1, 30], [3], [30, 2, 39, 11], [5]], [40, 1, 64, 16]
    q = torch.randn(4, 9, 64)
    for attention in implementations(cache, window):
        out = attention.decode(q, 1, rows_of(tables, lengths), windowed=True)
        everything = attention.decode(q, 1, rows_of(tables, lengths))
        for row in range(4):
            expected = plain(cache, q[row], 1, tables[row], lengths[row], max(0, lengths[row] - window))
            torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-5)
            expected = plain(cache, q[row], 1, tables[row], lengths[row])
            torch.testing.assert_close(everything[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_compiler_here_gives_the_native_kernel() -> None:
    import shutil

    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the torch attention is used")
    assert native.load() is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_decode_is_the_same_bit_for_bit_alone_and_in_a_batch(dtype: str) -> None:
    library = native.load()
    if library is None:
        pytest.skip("no C compiler: the torch attention is used")
    cache = filled_cache(dtype)
    attention = NativeDecode(cache, library)
    tables = [[i, (i * 7) % 40, (i * 3 + 1) % 40] for i in range(20)]
    lengths = [1 + (i * 13) % 48 for i in range(20)]
    q = torch.randn(20, 9, 64).to(cache.data.dtype)
    together = attention.decode(q, 0, rows_of(tables, lengths))
    for row in range(20):
        alone = attention.decode(q[row : row + 1], 0, rows_of([tables[row]], [lengths[row]]))
        assert torch.equal(alone[0], together[row])


def test_a_later_chunk_sees_the_earlier_ones() -> None:
    cache = filled_cache("float32")
    blocks, start, length = [8, 4, 9, 1], 32, 20
    q = torch.randn(length, 9, 64)
    mask = torch.full((length, start + length), float("-inf")).triu(start + 1)
    out = TorchAttention(cache).prefill(
        q, q[:, :3], q[:, :3], 0, ChunkSpan(0, start, length, torch.tensor(blocks), mask, mask)
    )
    for row in range(length):
        expected = plain(cache, q[row], 0, blocks, start + row + 1)
        torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-5)
