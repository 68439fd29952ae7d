"""fused_add_rms_norm: bit-equal to the unfused pair, which agrees with transformers."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import normal
from op_oracle import check_backward, leaf, opcheck
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

import glm5sdk
from glm5sdk import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 63, 65, 512])
def test_equals_add_then_norm(dtype: torch.dtype, width: int) -> None:
    x, residual = normal(5, width, seed=1, dtype=dtype), normal(5, width, seed=2, dtype=dtype)
    weight = normal(width, seed=3, dtype=dtype)
    y, total = ops.fused_add_rms_norm.reference(x, residual, weight, 1e-5)
    assert torch.equal(total, ops.add.reference(x, residual))
    assert torch.equal(y, ops.rms_norm.reference(total, weight, 1e-5))
    composed = next(i for i in ops.fused_add_rms_norm.implementations() if i.kind == "composed")
    with glm5sdk.use("reference"):
        again = composed.fn(x, residual, weight, 1e-5)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    x, weight = normal(7, 96, seed=4, dtype=dtype), normal(96, seed=5, dtype=dtype)
    theirs = GlmMoeDsaRMSNorm(96, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        want = theirs(x)
    got, _ = ops.fused_add_rms_norm.reference(x, torch.zeros_like(x), weight, 1e-5)
    assert torch.equal(got, want)


def test_equals_loops() -> None:
    x, residual, weight = normal(2, 5, seed=6), normal(2, 5, seed=7), normal(5, seed=8)
    y, total = ops.fused_add_rms_norm.reference(x, residual, weight, 1e-3)
    for t in range(2):
        row = [float(a) + float(b) for a, b in zip(x[t], residual[t], strict=True)]
        r = 1 / math.sqrt(math.fsum(v * v for v in row) / 5 + 1e-3)
        for n in range(5):
            assert float(total[t, n]) == row[n]
            assert abs(float(y[t, n]) - row[n] * r * float(weight[n])) < 1e-14


def test_gradients() -> None:
    check_backward(ops.fused_add_rms_norm, normal(3, 5, seed=9), normal(3, 5, seed=10), normal(5, seed=11), 1e-5)
    opcheck(ops.fused_add_rms_norm, leaf(3, 5), leaf(3, 5, seed=1), leaf(5, seed=2), 1e-5)
