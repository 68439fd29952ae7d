"""add: one rounding of the exact sum."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import normal
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounds_the_sum_once(dtype: torch.dtype) -> None:
    x, y = normal(3, 65, seed=1, dtype=dtype), 300 * normal(3, 65, seed=2, dtype=dtype)
    got = ops.add.reference(x, y)
    assert got.dtype == dtype
    assert torch.equal(got, (x.double() + y.double()).to(dtype))


def test_no_rows_and_gradients() -> None:
    assert ops.add.reference(torch.ones(0, 7), torch.ones(0, 7)).shape == (0, 7)
    check_backward(ops.add, normal(2, 5, seed=3), normal(2, 5, seed=4))
    opcheck(ops.add, leaf(2, 5), leaf(2, 5, seed=1))
