"""quantize_per_token, quantize_per_group, dequantize, hadamard: against plain loops and an explicit matrix."""

from __future__ import annotations

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops
from glm5sdk.core.errors import ContractError

FP8 = torch.float8_e4m3fn


def e4m3_values() -> list[float]:
    """Every finite non-negative e4m3 number, from its definition: 4 bits of exponent, bias 7, 3 of mantissa, no inf."""
    values = [m * 2.0**-9 for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return values[:-1]  # the last code is NaN


def nearest_even(value: float, grid: list[float]) -> float:
    """The nearest grid value, ties to the even code, saturating."""
    size = min(abs(value), grid[-1])
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - size), i % 2))
    return grid[best] if value >= 0 else -grid[best]


def test_fp8_is_round_to_nearest_even_and_saturates() -> None:
    grid = e4m3_values()
    assert len(grid) == 127
    assert grid[-1] == 448
    x = torch.cat((torch.linspace(-3, 3, 301), torch.tensor([448.0, 0.0, 1e-3, 17.0, 18.0, 19.0])))[None]
    q, scale = ops.quantize_per_token(x, FP8)
    assert scale.item() == 1.0
    assert q.float()[0].tolist() == [nearest_even(float(v), grid) for v in x[0]]
    assert q.dtype == FP8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_per_token(dtype: torch.dtype) -> None:
    x = torch.randn(9, 37).to(dtype)
    x[4] = 0
    q, scale = ops.quantize_per_token(x)
    assert q.dtype == torch.int8
    for t in range(9):
        row = x[t].float()
        want = torch.tensor(max(float(row.abs().max()), 1e-8)) / 127
        assert float(scale[t, 0]) == float(want)
        assert q[t].tolist() == [round(float(v / want)) for v in row]
    assert int(q.abs().max()) == 127
    assert not q[4].any()


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_per_group_equals_per_token_of_each_slice(dtype: torch.dtype, n: int) -> None:
    x = torch.randn(5, n) * torch.logspace(-3, 3, n)
    q, scale = ops.quantize_per_group(x, dtype)
    assert scale.shape == (5, -(-n // 128))
    for g, start in enumerate(range(0, n, 128)):
        want, s = ops.quantize_per_token(x[:, start : start + 128].contiguous(), dtype)
        assert torch.equal(q[:, start : start + 128].float(), want.float())
        assert torch.equal(scale[:, g : g + 1], s)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_dequantize_brings_values_back(out_dtype: torch.dtype) -> None:
    x = torch.randn(6, 300)
    for quantised, step in [
        (ops.quantize_per_token(x), 1 / 127),
        (ops.quantize_per_group(x, FP8), 2**-4),
        (ops.quantize_per_token(x, FP8), 2**-4),
    ]:
        back = ops.dequantize(*quantised, out_dtype)
        assert back.dtype == out_dtype
        q, scale = quantised
        for t, n in [(0, 0), (3, 127), (3, 128), (5, 299)]:
            exact = float(q[t, n].float() * scale[t, n // 128 if scale.shape[1] > 1 else 0])
            assert float(back[t, n]) == float(torch.tensor(exact).to(out_dtype))
        assert float((back.float() - x).abs().max()) < step * float(x.abs().max())


def test_tiny_rows_keep_the_floor_of_the_scale() -> None:
    x = torch.full((1, 4), 1e-7)
    assert float(ops.quantize_per_token(x, FP8)[1]) == float(torch.tensor(1e-4) / 448)
    assert float(ops.quantize_per_token(x * 0)[1]) == float(torch.tensor(1e-8) / 127)


def test_refusals() -> None:
    with pytest.raises(ContractError, match="dtype is i(nt)?32, needs int8 or float8_e4m3fn"):
        ops.quantize_per_token(torch.ones(2, 3), torch.int32)
    with pytest.raises(ContractError, match="q is float32, needs int8 or float8_e4m3fn"):
        ops.dequantize(torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(ContractError, match="G"):
        ops.dequantize(torch.ones(2, 300, dtype=torch.int8), torch.ones(2, 2))
    with pytest.raises(ContractError, match="out_dtype is torch.int32"):
        ops.dequantize(torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1), torch.int32)
    for n in (0, 3, 12):
        with pytest.raises(ContractError, match="N"):
            ops.hadamard(torch.ones(2, n))


def test_no_rows() -> None:
    assert ops.quantize_per_token(torch.ones(0, 3))[1].shape == (0, 1)
    assert ops.quantize_per_group(torch.ones(0, 300))[1].shape == (0, 3)
    assert ops.hadamard(torch.ones(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_hadamard_is_the_sylvester_matrix(n: int) -> None:
    x = torch.randn(3, n).double()
    # Entry (i, j) is the parity of the bits that i and j share.
    h = torch.tensor([[1.0 - 2 * ((i & j).bit_count() % 2) for j in range(n)] for i in range(n)]).double()
    y = ops.hadamard.reference(x)
    torch.testing.assert_close(y, x @ h / n**0.5)
    torch.testing.assert_close(ops.hadamard.reference(y), x)
    check_backward(ops.hadamard, x)


def test_hadamard_in_bf16_rounds_once() -> None:
    x = torch.randn(5, 128).bfloat16()
    assert torch.equal(ops.hadamard.reference(x), ops.hadamard.reference(x.float()).bfloat16())


def test_opcheck() -> None:
    x = torch.randn(3, 130)
    for dtype in (torch.int8, FP8):
        opcheck(ops.quantize_per_token, x, dtype)
        opcheck(ops.quantize_per_group, x, dtype)
    opcheck(ops.dequantize, *ops.quantize_per_group(x), torch.bfloat16)
    opcheck(ops.hadamard, leaf(3, 8))


def test_compare_allows_ties_and_nothing_more() -> None:
    x = torch.randn(30, 130)
    compare = ops.quantize_per_token.tests.compare
    for dtype in (torch.int8, FP8):
        got = ops.quantize_per_token(x, dtype)
        want = ops.quantize_per_token.reference(x.double(), dtype)
        compare({"x": x}, got, want, 1e-6)
        with pytest.raises(AssertionError):
            compare({"x": x}, (got[0].float().add(1).to(dtype), got[1]), want, 1e-6)
        with pytest.raises(AssertionError):
            compare({"x": x}, (got[0], got[1] * 1.001), want, 1e-6)
