"""rope: against complex numbers, against transformers up to its order of elements, and its refusals."""

from __future__ import annotations

import cmath

import pytest
import torch
from attention_oracle import normal, rope_table
from op_oracle import check_backward, leaf, opcheck
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

from glm5sdk import ops
from glm5sdk.core.errors import ContractError


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotates_pairs_like_complex_numbers(interleaved: bool) -> None:
    rope, positions = 6, [4, 0, 2]
    x = normal(3, 2, rope, seed=1)
    got = ops.rope.reference(x, torch.tensor(positions), rope_table(5, rope), interleaved)
    for t, position in enumerate(positions):
        for h in range(2):
            for j in range(rope // 2):
                a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + rope // 2)
                turned = complex(x[t, h, a], x[t, h, b]) * cmath.exp(1j * position * 10000.0 ** (-2 * j / rope))
                assert abs(complex(got[t, h, a], got[t, h, b]) - turned) < 1e-14


def test_interleaved_equals_transformers_up_to_order() -> None:
    rope, length = 64, 33
    x, table = normal(length, 3, rope, seed=2), rope_table(length, rope)
    got = ops.rope.reference(x, torch.arange(length), table, True)
    cos, sin = table.chunk(2, -1)
    theirs, _ = apply_rotary_pos_emb_interleave(x, x, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    torch.testing.assert_close(torch.cat([got[..., 0::2], got[..., 1::2]], -1), theirs, rtol=0, atol=1e-14)


def test_scores_depend_on_distance_alone() -> None:
    table = rope_table(50, 8)
    q, k = normal(1, 1, 8, seed=3), normal(1, 1, 8, seed=4)

    def score(at: int, other: int) -> float:
        turned = [ops.rope.reference(x, torch.tensor([p]), table, True) for x, p in ((q, at), (k, other))]
        return float((turned[0] * turned[1]).sum())

    assert abs(score(7, 3) - score(46, 42)) < 1e-12


def test_bf16_uses_float32_tables_and_rounds_once() -> None:
    x, table = normal(9, 2, 4, seed=5, dtype=torch.bfloat16), rope_table(9, 4).float()
    got = ops.rope.reference(x, torch.arange(9), table, True)
    want = ops.rope.reference(x.double(), torch.arange(9), table.double(), True)
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()


def test_refuses_odd_widths_and_positions_outside_the_table() -> None:
    with pytest.raises(ContractError, match="R is 3, needs R % 2 == 0"):
        ops.rope(torch.ones(1, 1, 3), torch.tensor([0]), torch.ones(2, 3))
    for bad in (2, -1):
        with pytest.raises(ContractError, match=r"rope: positions\[1\] is"):
            ops.rope.reference(torch.ones(2, 1, 2), torch.tensor([0, bad]), torch.ones(2, 2), True)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients(interleaved: bool) -> None:
    positions, table = torch.tensor([2, 0, 1]), rope_table(3, 6)
    check_backward(ops.rope, normal(3, 2, 6, seed=6), positions, table, interleaved)
    opcheck(ops.rope, leaf(3, 2, 6), positions, table.float(), interleaved)
