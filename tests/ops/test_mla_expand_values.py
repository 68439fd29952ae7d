"""mla_expand_values: against loops, one rounding, quantised weights."""

from __future__ import annotations

import torch
from attention_oracle import dot, normal
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops
from glm5sdk.ops._weights import dequantize_weight, quantize_weight


def test_equals_loops() -> None:
    out, w = normal(3, 2, 5, seed=1), normal(2, 4, 5, seed=2)
    got = ops.mla_expand_values.reference(out, w)
    for t in range(3):
        for h in range(2):
            for d in range(4):
                assert abs(float(got[t, 4 * h + d]) - dot(w[h, d].tolist(), out[t, h].tolist())) < 1e-14


def test_bf16_rounds_once() -> None:
    out, w = normal(5, 2, 40, seed=3, dtype=torch.bfloat16), normal(2, 12, 40, seed=4, dtype=torch.bfloat16)
    got, want = ops.mla_expand_values.reference(out, w), ops.mla_expand_values.reference(out.double(), w.double())
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-5).all()


def test_quantised_weight_counts_as_its_values() -> None:
    out, w = normal(3, 2, 130, seed=5), quantize_weight(normal(2, 12, 130, seed=6).float(), "fp8")
    want = ops.mla_expand_values.reference(out, dequantize_weight(w, torch.float64))
    assert torch.equal(ops.mla_expand_values.reference(out, w), want)


def test_no_rows_and_gradients() -> None:
    assert ops.mla_expand_values.reference(torch.ones(0, 2, 5), torch.ones(2, 4, 5)).shape == (0, 8)
    check_backward(ops.mla_expand_values, normal(3, 2, 5, seed=7), normal(2, 4, 5, seed=8))
    opcheck(ops.mla_expand_values, leaf(3, 2, 5), leaf(2, 4, 5, seed=1))
