"""linear: every weight kind against plain loops, gradients, rounding."""

from __future__ import annotations

import math

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._weights import dequantize_weight, quantize_weight
from glm5sdk.registry import Weight


def round_half_even(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


def test_equals_loops_in_float64() -> None:
    x, w, b = torch.randn(3, 5).double(), torch.randn(4, 5).double(), torch.randn(4).double()
    y = ops.linear.reference(x, w, b)
    for t in range(3):
        for o in range(4):
            want = math.fsum(float(x[t, n]) * float(w[o, n]) for n in range(5)) + float(b[o])
            assert abs(float(y[t, o]) - want) < 1e-12


def test_bf16_rounds_once_after_the_bias() -> None:
    x, w, b = (torch.randn(s).bfloat16() for s in ((7, 40), (9, 40), (9,)))
    want = x.double() @ w.double().T + b.double()
    got = ops.linear.reference(x, w, b)
    assert got.dtype == torch.bfloat16
    # One rounding: never further than half a step from float32's sum, which is exact to 1e-5 here.
    assert float(((got.double() - want).abs() / want.abs().clamp(min=0.1)).max()) < 2**-8
    assert ops.linear.reference(x, w, None, torch.float32).dtype == torch.float32
    assert torch.allclose(ops.linear.reference(x, w, b, torch.float32).double(), want, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 7, 5), (1, 1, 1), (63, 65, 64), (2, 6144, 576)])
def test_shapes(shape: tuple[int, int, int]) -> None:
    t, n, o = shape
    x, w = torch.randint(-2, 3, (t, n)).float(), torch.randint(-2, 3, (o, n)).float()
    assert torch.equal(ops.linear.reference(x, w).long(), x.long() @ w.long().T)


def test_w8a8_is_integer_exact() -> None:
    x, w = torch.randn(3, 150), torch.randn(4, 150)
    weight = quantize_weight(w, "w8a8")
    got = ops.linear(x, weight)
    q, sw = weight.tensors
    for t in range(3):
        sx = max(x[t].abs().max().item(), 1e-8)
        sx32 = torch.tensor(sx, dtype=torch.float32) / 127
        qx = [round_half_even(float(v / sx32), -127, 127) for v in x[t]]
        for o in range(4):
            dot = sum(a * int(b) for a, b in zip(qx, q[o], strict=True))
            assert float(got[t, o]) == float(torch.tensor(float(dot)) * (sx32 * sw[o]))
    assert (dequantize_weight(weight) - w).abs().max() < w.abs().max() / 127


def test_w4a8_groups_of_128_ascending() -> None:
    x, w = torch.randn(2, 300), torch.randn(3, 300)
    weight = quantize_weight(w, "w4a8")
    packed, scale = weight.tensors
    assert packed.shape == (3, 150)
    assert scale.shape == (3, 3)
    got = ops.linear(x, weight)
    for t in range(2):
        sx = x[t].abs().max() / 127
        for o in range(3):
            total = torch.tensor(0.0)
            for g in range(3):
                dot = 0
                for n in range(128 * g, min(300, 128 * g + 128)):
                    byte = int(packed[o, n // 2])
                    nibble = byte & 15 if n % 2 == 0 else byte >> 4
                    value = nibble - 16 if nibble > 7 else nibble
                    dot += value * round_half_even(float(x[t, n] / sx), -127, 127)
                total = total + torch.tensor(float(dot)) * (sx * scale[o, g])
            assert float(got[t, o]) == float(total)
    assert ((dequantize_weight(weight) - w).abs() <= scale.repeat_interleave(128, 1)[:, :300] * 0.51).all()


def test_w4a8_reads_minus_eight() -> None:
    weight = Weight("w4a8", "plain", (1, 3), (torch.tensor([[0x78, 0x0F]], dtype=torch.uint8), torch.ones(1, 1)))
    assert dequantize_weight(weight).tolist() == [[-8.0, 7.0, -1.0]]


def test_fp8_blocks_by_absolute_row() -> None:
    x, w = torch.randn(2, 200), torch.randn(300, 200)
    w[:128] *= 100  # a head that starts inside a block must still use the block's own scale
    weight = quantize_weight(w, "fp8")
    q, scale = weight.tensors
    assert scale.shape == (3, 2)
    full = dequantize_weight(weight)
    for row, column in [(0, 0), (127, 127), (128, 128), (299, 199), (150, 60)]:
        assert float(full[row, column]) == float(q[row, column].float() * scale[row // 128, column // 128])
    assert ((full - w).abs() <= w.abs() * 2**-4 + scale.max() * 2**-9).all()
    got = ops.linear(x, weight)
    for o in (0, 127, 128, 299):
        total = 0.0
        for g in range(2):
            part = x[1, 128 * g : 128 * g + 128]
            sx = part.abs().max().clamp(min=1e-4) / 448
            qx = (part / sx).clamp(-448, 448).to(torch.float8_e4m3fn)
            qw = q[o, 128 * g : 128 * g + 128].float()
            dot = math.fsum(float(a) * float(b) for a, b in zip(qx.float(), qw, strict=True))
            total += dot * float(sx * scale[o // 128, g])
        assert abs(float(got[1, o]) - total) <= 1e-5 * max(1.0, abs(total))


@pytest.mark.parametrize("kind", ["w8a8", "w4a8", "fp8"])
def test_quantised_kinds_approximate_and_pass_gradients_through(kind: str) -> None:
    x, w = leaf(6, 257), torch.randn(130, 257)
    weight = quantize_weight(w, kind)
    y = ops.linear(x, weight)
    want = x.detach() @ dequantize_weight(weight).T
    assert float((y.detach() - want).norm() / want.norm()) < 0.05
    y.sum().backward()
    torch.testing.assert_close(x.grad, dequantize_weight(weight).sum(0).expand(6, -1), rtol=1e-4, atol=1e-4)


def test_quantised_experts_keep_their_axis() -> None:
    w = torch.randn(3, 130, 257)
    for kind in ("w8a8", "w4a8", "fp8"):
        whole, one = quantize_weight(w, kind), quantize_weight(w[1], kind)
        assert torch.equal(dequantize_weight(whole)[1], dequantize_weight(one))


@pytest.mark.parametrize("bias", [True, False])
def test_backward(bias: bool) -> None:
    x, w = torch.randn(6, 5).double(), torch.randn(4, 5).double()
    check_backward(ops.linear, x, w, torch.randn(4).double() if bias else None, None)


def test_opcheck() -> None:
    opcheck(ops.linear, leaf(5, 7), leaf(3, 7, seed=1), leaf(3, seed=2))
    opcheck(ops.linear, leaf(5, 7), leaf(3, 7, seed=1), None, torch.float32)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ContractError, match="axis N of w is 6, needs 5"):
        ops.linear(torch.ones(2, 5), torch.ones(3, 6))
    with pytest.raises(ContractError, match="layout"):
        ops.linear.reference(torch.ones(2, 5), Weight("plain", "cpu.tiles", (3, 5), (torch.ones(15),)))
    with pytest.raises(ContractError, match="kind is 'w2a2'"):
        quantize_weight(torch.ones(2, 2), "w2a2")
