"""moe_permute, moe_unpermute, grouped_gemm: against plain loops, each other's inverse, float64 autograd."""

from __future__ import annotations

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._weights import dequantize_weight, quantize_weight

IDS = torch.tensor([[0, 2], [-1, 2], [1, 2], [-1, -1], [0, 1]], dtype=torch.int32)


def test_permute_is_a_stable_sort() -> None:
    x = torch.arange(10.0).view(5, 2) + 1
    rows, row_ids, offsets = ops.moe_permute.reference(x, IDS, 4)
    # Slots of expert 0, then 1, then 2, in the order of tokens; expert 3 has none.
    assert row_ids.tolist() == [0, 8, 4, 9, 1, 3, 5, -1, -1, -1]
    assert offsets.tolist() == [0, 2, 4, 7, 7]
    assert torch.equal(rows[:7], x[torch.tensor([0, 4, 2, 4, 0, 1, 2])])
    assert not rows[7:].any()


def test_unpermute_sums_in_the_order_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator)
    weights = torch.randn(5, 2, generator=generator)
    ids = IDS.flip(1)  # a slot order that is not ascending: the order of rows still is
    rows, row_ids, _ = ops.moe_permute.reference(x, ids, 4)
    rows = rows * torch.arange(10.0)[:, None]
    y = ops.moe_unpermute.reference(rows, row_ids, weights.flip(1))
    for t in range(5):
        want = torch.zeros(3)
        for r in range(10):
            slot = int(row_ids[r])
            if slot >= 0 and slot // 2 == t:
                want = want + weights.flip(1).reshape(-1)[slot] * rows[r]
        assert torch.equal(y[t], want)


def test_absent_slots_are_not_read() -> None:
    rows, row_ids, _ = ops.moe_permute.reference(torch.ones(5, 3), IDS, 4)
    rows[7:] = torch.nan
    weights = torch.where(IDS < 0, torch.nan, 1.0)
    y = ops.moe_unpermute.reference(rows, row_ids, weights)
    assert y[:, 0].tolist() == [2, 1, 2, 0, 2]


def test_grouped_gemm_equals_a_loop_over_rows() -> None:
    x, w = torch.randn(9, 5).double(), torch.randn(4, 3, 5).double()
    offsets = torch.tensor([0, 2, 2, 7, 8], dtype=torch.int32)
    x[8] = torch.nan  # past the last row: never read
    y = ops.grouped_gemm.reference(x, w, offsets)
    owner = [0, 0, 2, 2, 2, 2, 2, 3]
    for r, e in enumerate(owner):
        torch.testing.assert_close(y[r], w[e] @ x[r], rtol=1e-12, atol=1e-12)
    assert not y[8].any()


@pytest.mark.parametrize("kind", ["w8a8", "w4a8", "fp8"])
def test_grouped_gemm_of_quantised_weights(kind: str) -> None:
    x, w = torch.randn(6, 200), torch.randn(2, 140, 200)
    weight = quantize_weight(w, kind)
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    with glm5sdk.use("reference"):
        y = ops.grouped_gemm(x, weight, offsets)
        one = ops.linear(x[4:], quantize_weight(w[1], kind))
    assert torch.equal(y[4:], one)
    want = x[:4] @ dequantize_weight(weight)[0].T
    assert float((y[:4] - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 2, 4, 6]])
def test_offsets_must_ascend_inside_the_rows(offsets: list[int]) -> None:
    with pytest.raises(ContractError, match="offsets are"):
        ops.grouped_gemm.reference(torch.ones(5, 2), torch.ones(3, 4, 2), torch.tensor(offsets, dtype=torch.int32))


def test_ids_and_row_ids_are_checked() -> None:
    with pytest.raises(ContractError, match="expert id is 2, needs -1 or 0 <= id < 2"):
        ops.moe_permute.reference(torch.ones(5, 2), IDS, 2)
    for row_ids in ([0, 0], [2, -1], [-2, 0]):
        with pytest.raises(ContractError, match="distinct slots"):
            ops.moe_unpermute.reference(torch.ones(2, 3), torch.tensor(row_ids, dtype=torch.int32), torch.ones(1, 2))


def test_nothing_to_sort() -> None:
    empty = torch.ones(0, 2, dtype=torch.int32)
    rows, row_ids, offsets = ops.moe_permute.reference(torch.ones(0, 3), empty, 2)
    assert rows.shape == (0, 3)
    assert offsets.tolist() == [0, 0, 0]
    assert ops.moe_unpermute.reference(rows, row_ids, torch.ones(0, 2)).shape == (0, 3)
    assert ops.grouped_gemm.reference(rows, torch.ones(2, 4, 3), offsets).shape == (0, 4)


def test_backward() -> None:
    x, weights, w = torch.randn(5, 3).double(), torch.randn(5, 2).double(), torch.randn(4, 6, 3).double()
    check_backward(ops.moe_permute, x, IDS, 4)
    rows, row_ids, offsets = ops.moe_permute.reference(x, IDS, 4)
    check_backward(ops.moe_unpermute, torch.randn(10, 3).double(), row_ids, weights)
    check_backward(ops.grouped_gemm, rows, w, offsets)


def test_opcheck() -> None:
    x, w = leaf(5, 3), leaf(4, 6, 3, seed=1)
    opcheck(ops.moe_permute, x, IDS, 4)
    rows, row_ids, offsets = ops.moe_permute.reference(x.detach(), IDS, 4)
    opcheck(ops.grouped_gemm, rows.requires_grad_(), w, offsets)
    opcheck(ops.moe_unpermute, leaf(10, 3), row_ids, leaf(5, 2, seed=2))
