"""layer_norm: against torch in float64, and rounded once."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import normal
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops


@pytest.mark.parametrize("width", [2, 63, 65, 128])
def test_equals_torch_in_float64(width: int) -> None:
    x, w, b = 3 * normal(4, width, seed=1) + 5, normal(width, seed=2), normal(width, seed=3)
    want = torch.nn.functional.layer_norm(x, (width,), w, b, 1e-6)
    torch.testing.assert_close(ops.layer_norm.reference(x, w, b, 1e-6), want, rtol=1e-12, atol=1e-12)


def test_one_column_is_the_bias() -> None:
    x, w, b = normal(3, 1, seed=1), normal(1, seed=2), normal(1, seed=3)
    assert torch.equal(ops.layer_norm.reference(x, w, b, 1e-6), b.expand(3, 1))


def test_bf16_rounds_once() -> None:
    x, w, b = (normal(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(9, 128), (128,), (128,)]))
    got = ops.layer_norm.reference(x, w, b, 1e-6)
    want = ops.layer_norm.reference(x.double(), w.double(), b.double(), 1e-6)
    assert got.dtype == torch.bfloat16
    # Half a step of bfloat16, and float32's own error where terms cancel.
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-5).all()


def test_gradients() -> None:
    check_backward(ops.layer_norm, normal(3, 5, seed=4), normal(5, seed=5), normal(5, seed=6), 1e-6)
    opcheck(ops.layer_norm, leaf(3, 5), leaf(5, seed=1), leaf(5, seed=2), 1e-6)
