"""The gated activation's kernel: one rounding after silu, one after the product, clamps before both."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FLOATS, draw, within

from glm5sdk_cpu import _C


def run(level, x, limit=None):
    y = torch.full((x.shape[0], x.shape[1] // 2), math.nan, dtype=x.dtype)
    _C.silu_and_mul(level, x, limit, y)
    return y


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 3, 16, 63, 64, 130])
@pytest.mark.parametrize("limit", [None, 1.0, 10.0])
def test_agrees_with_float64(level, dtype, n, limit):
    x = draw(5, 2 * n, dtype=dtype, seed=n, scale=3.0)
    gate, up = x.double().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    within(run(level, x, limit), gate / (1 + (-gate).exp()) * up, dtype)


def test_every_bfloat16_gate_is_rounded_once_to_itself_and_once_with_up(level):
    gate = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite() & (gate > -88)][:, None]  # below, e^-gate leaves float32 and silu is 0
    for value in (1.0, -0.7109375, 3e38, 1e-38):
        up = torch.full_like(gate, value)
        y = run(level, torch.cat((gate, up), 1))
        silu = gate.double() / (1 + (-gate.double()).exp())
        # A float32 silu lies within 2 units of its last place: both neighbours of a rounding boundary are right there.
        near = [(silu * (1 + d * 2.0**-22)).float().to(torch.bfloat16) * up for d in (-1, 0, 1)]
        assert ((y == near[0]) | (y == near[1]) | (y == near[2])).all()


def test_extremes(level):
    inf = math.inf
    gate = torch.tensor([[-inf, inf, math.nan, 0.0, -200.0, 200.0, 1.0, 1.0]])
    up = torch.tensor([[1.0, 1, 1, 1, 1, 1, math.nan, inf]])
    y = run(level, torch.cat((gate, up), 1)).tolist()[0]
    assert math.isnan(y[0]) and y[1] == inf and math.isnan(y[2]) and y[3] == 0
    assert y[4] == 0 and y[5] == 200 and math.isnan(y[6]) and y[7] == inf
    y = run(level, torch.cat((gate, up), 1), 2.0).tolist()[0]
    assert math.isnan(y[2]) and math.isnan(y[6])  # a clamp does not hide a NaN
    assert y[1] == y[5] == pytest.approx(2 / (1 + math.exp(-2)))
    assert y[7] == pytest.approx(2 / (1 + math.exp(-1)))


def test_rows_do_not_know_their_batch(native, level):
    for dtype in FLOATS:
        x = draw(301, 2 * 77, dtype=dtype, seed=9)
        native.set_num_threads(1)
        y = run(level, x)
        native.set_num_threads(3)
        assert torch.equal(run(level, x), y)
        for a, b in ((0, 1), (7, 9), (100, 301)):
            assert torch.equal(run(level, x[a:b]), y[a:b])


def test_no_tokens(level):
    assert run(level, torch.empty(0, 6)).shape == (0, 3)
