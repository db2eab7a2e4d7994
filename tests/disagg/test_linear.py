"""Linear layers: the compiled kernel agrees with float64, and no row's value depends on the batch around it."""

from __future__ import annotations

import pytest
import torch

from backends.disagg.engine import native
from backends.disagg.engine.linear import NativeLinear, torch_linear

DTYPES = [torch.float32, torch.bfloat16]
needs_compiler = pytest.mark.skipif(native.load() is None, reason="no C compiler here, so no compiled kernel")


def case(rows: int, width: int, outs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * 1000 + outs)
    return torch.randn(rows, width).to(dtype), (torch.randn(outs, width) / width**0.5).to(dtype)


def native_linear(dtype: torch.dtype) -> NativeLinear:
    library = native.load()
    assert library is not None
    return NativeLinear(library, dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outs"), [(8, 1), (16, 2), (64, 3), (576, 960), (1536, 577), (40, 100)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 17])
def test_the_kernel_agrees_with_exact_arithmetic(dtype: torch.dtype, rows: int, width: int, outs: int) -> None:
    x, weight = case(rows, width, outs, dtype)
    got = native_linear(dtype)(x, weight, 0)
    exact = x.double() @ weight.double().T
    assert got.dtype == dtype and got.shape == (rows, outs)
    torch.testing.assert_close(got, exact.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_token_is_the_same_bit_for_bit_in_any_batch(dtype: torch.dtype) -> None:
    linear = native_linear(dtype)
    x, weight = case(40, 576, 960, dtype)
    alone = torch.cat([linear(row[None], weight, 0) for row in x])
    for rows in (2, 3, 4, 7, 16, 40):
        assert torch.equal(linear(x[:rows], weight, 0), alone[:rows])
    mixed = linear(x, weight, 25)
    assert torch.equal(mixed[25:], alone[25:]), "beside a prompt's chunk too"
    assert torch.equal(mixed[:25], torch_linear(x[:25], weight, 25))


@needs_compiler
def test_threads_change_nothing() -> None:
    linear = native_linear(torch.float32)
    x, weight = case(5, 576, 961, torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, weight, 0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_compiler
def test_widths_the_kernel_cannot_take_go_to_torch() -> None:
    x, weight = case(3, 30, 10, torch.float32)
    assert torch.equal(native_linear(torch.float32)(x, weight, 0), torch_linear(x, weight, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_short_chunk_is_the_same_as_in_a_long_one(dtype: torch.dtype, threads: int) -> None:
    x, weight = case(600, 576, 960, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = torch_linear(x, weight, 600)
        different = [n for n in range(1, 130) if not torch.equal(torch_linear(x[:n], weight, n), whole[:n])]
    finally:
        torch.set_num_threads(before)
    assert different == []


def test_loading_the_kernels_leaves_denormal_numbers_alone() -> None:
    """A library linked with -ffast-math would flush them to zero in the whole thread."""
    native.load()
    assert 5e-324 * 1 > 0
    assert torch.tensor(1e-310, dtype=torch.float64) > 0
