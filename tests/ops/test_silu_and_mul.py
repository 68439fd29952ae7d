"""silu_and_mul: against loops, its clamp, its two roundings."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import normal
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops
from glm5sdk.core.errors import ContractError


@pytest.mark.parametrize("limit", [None, 0.7])
def test_equals_loops(limit: float | None) -> None:
    x = 2 * normal(3, 10, seed=1)
    got = ops.silu_and_mul.reference(x, limit)
    for t in range(3):
        for i in range(5):
            gate, up = float(x[t, i]), float(x[t, 5 + i])
            if limit is not None:
                gate, up = min(gate, limit), max(-limit, min(up, limit))
            assert abs(float(got[t, i]) - gate / (1 + math.exp(-gate)) * up) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_silu_then_the_product(dtype: torch.dtype) -> None:
    x = normal(4, 130, seed=2, dtype=dtype)
    gate, up = x.chunk(2, -1)
    want = torch.nn.functional.silu(gate.float()).to(dtype) * up
    assert torch.equal(ops.silu_and_mul.reference(x), want)


def test_odd_width_is_refused() -> None:
    with pytest.raises(ContractError, match="2\\*I"):
        ops.silu_and_mul(torch.ones(2, 5))


@pytest.mark.parametrize("limit", [None, 0.7])
def test_gradients(limit: float | None) -> None:
    check_backward(ops.silu_and_mul, normal(3, 10, seed=3), limit)
    opcheck(ops.silu_and_mul, leaf(3, 10), limit)
