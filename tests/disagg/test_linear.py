"""Linear layers agree with exact arithmetic, and no row's value depends on the batch around it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from backends.disagg.engine import native
from backends.disagg.engine.linear import linear as torch_linear
from backends.disagg.engine.native import structs
from backends.disagg.engine.quantized import INT4_GROUP, Int4, Quantized, Weight, quantize, quantize_int4

DTYPES = [torch.float32, torch.bfloat16]
needs_compiler = pytest.mark.skipif(native.load() is None, reason="no C compiler here, so no compiled kernel")


def case(rows: int, width: int, outs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * 1000 + outs)
    return torch.randn(rows, width).to(dtype), (torch.randn(outs, width) / width**0.5).to(dtype)


class NativeLinear:
    """One layer by the compiled kernel, float32 out."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        library = native.load()
        assert library is not None
        if dtype is None:
            assert isinstance(weight, torch.Tensor)
            dtype = weight.dtype
        self.weights = structs.Weights(library, dtype)
        self.struct = self.weights.linear(weight, bias)
        self.kernel = getattr(library, f"linear_rows_{self.weights.suffix}")

    def __call__(self, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
        out = torch.full((x.shape[0], self.struct.outs), torch.nan)
        self.kernel(ctypes.byref(self.struct), x.contiguous().data_ptr(), x.shape[0], out.data_ptr(), threads)
        return out


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outs"), [(2, 1), (16, 31), (64, 33), (576, 960), (1536, 577), (40, 100)])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 40])
def test_the_kernel_agrees_with_exact_arithmetic(dtype: torch.dtype, rows: int, width: int, outs: int) -> None:
    x, weight = case(rows, width, outs, dtype)
    bias = torch.randn(outs)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(NativeLinear(weight)(x).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(NativeLinear(weight, bias)(x).double(), exact + bias.double(), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outs"), [(2, 1), (16, 31), (64, 33), (576, 960), (40, 100)])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40])
def test_int8_agrees_with_exact_arithmetic_on_the_rounded_weights(
    dtype: torch.dtype, rows: int, width: int, outs: int
) -> None:
    x, weight = case(rows, width, outs, dtype)
    rounded, bias = quantize(weight), torch.randn(outs)
    exact = x.double() @ (rounded.codes.double() * rounded.scales.double()[:, None]).T + bias.double()
    got = NativeLinear(rounded, bias, dtype)(x)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-5)
    loose = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(torch_linear(x, rounded).float() + bias, got, rtol=loose, atol=loose)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_int8_code_is_decoded_as_what_it_stands_for(dtype: torch.dtype) -> None:
    codes = torch.arange(-127, 128, dtype=torch.int8)
    weight = Quantized(torch.stack([codes, codes.flip(0)]).T.contiguous(), torch.ones(len(codes)))
    got = NativeLinear(weight, dtype=dtype)(torch.eye(2).to(dtype))
    assert torch.equal(got, weight.codes.T.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_is_within_half_a_step_of_the_weights_and_its_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    x, weight = case(40, 576, 960, dtype)
    rounded = quantize_int4(weight)
    assert isinstance(rounded, Int4) and rounded.shape == weight.shape
    stands_for = torch_linear(torch.eye(576).to(dtype), rounded).T.float()
    step = rounded.scales_and_zeros[..., 0].float().T.repeat_interleave(INT4_GROUP, dim=1)
    slack = 2.0**-7 * weight.float().abs().amax() if dtype is torch.bfloat16 else 1e-6
    assert bool(((stands_for - weight.float()).abs() <= step / 2 + slack).all())
    whole = torch_linear(x, rounded)
    assert all(torch.equal(torch_linear(x[:n], rounded), whole[:n]) for n in (1, 2, 7, 12, 33))


def test_a_shape_that_the_int4_kernel_does_not_take_stays_int8() -> None:
    assert isinstance(quantize_int4(torch.randn(40, 50)), Quantized)


def test_rounding_to_int8_is_to_the_nearest_and_keeps_zeros() -> None:
    weight = torch.randn(50, 64)
    weight[7] = 0.0
    rounded = quantize(weight)
    off = (rounded.codes * rounded.scales[:, None] - weight).abs()
    assert bool((off <= rounded.scales[:, None] * 0.5001).all())
    assert rounded.codes.abs().amax() == 127 and not rounded.codes[7].any()


@needs_compiler
@pytest.mark.parametrize("kind", [*DTYPES, "int8"], ids=str)
def test_a_row_is_the_same_bit_for_bit_alone_in_a_batch_and_in_a_prompt(kind: torch.dtype | str) -> None:
    x, weight = case(100, 576, 960, torch.bfloat16 if isinstance(kind, str) else kind)
    linear = NativeLinear(quantize(weight) if kind == "int8" else weight, dtype=x.dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 7, 12, 13, 25, 100):
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[-rows:]), alone[-rows:])


@needs_compiler
def test_threads_change_nothing() -> None:
    x, weight = case(5, 576, 961, torch.float32)
    linear = NativeLinear(weight)
    assert all(torch.equal(linear(x, 1), linear(x, threads)) for threads in (2, 3, 64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_short_chunk_is_the_same_as_in_a_long_one_in_torch(dtype: torch.dtype, threads: int) -> None:
    x, weight = case(600, 576, 960, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = torch_linear(x, weight)
        different = [n for n in range(1, 130) if not torch.equal(torch_linear(x[:n], weight), whole[:n])]
    finally:
        torch.set_num_threads(before)
    assert different == []


def test_loading_the_kernels_leaves_denormal_numbers_alone() -> None:
    """A library linked with -ffast-math would flush them to zero in the whole thread."""
    native.load()
    assert 5e-324 * 1 > 0
    assert torch.tensor(1e-310, dtype=torch.float64) > 0
