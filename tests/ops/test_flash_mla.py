"""flash_mla: the bits of the sparse op given every position, against loops, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import attention, i32, key_at, normal
from op_oracle import check_backward, leaf, opcheck
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError

C, R, H = 5, 2, 3
TABLE = i32([[4, 1], [0, 3]])
REQUESTS = i32([1, 0, -1, 1, 0, 0])
LENGTHS = i32([6, 2, 3, 0, 4, 5])


def arguments(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    cache = normal(5, 3, C + R, seed=2, dtype=dtype)
    cache[2] = math.nan  # belongs to nobody
    cache[1, 2] = math.nan  # position 5 of request 0, beyond every length
    return normal(6, H, C + R, seed=1, dtype=dtype), cache, TABLE, REQUESTS, LENGTHS


def test_equals_loops() -> None:
    q, cache, *rest = arguments()
    out, lse = ops.flash_mla.reference(q, cache, *rest, 0.3, C)
    for t, (request, length) in enumerate(zip(REQUESTS.tolist(), LENGTHS.tolist(), strict=True)):
        keys = [key_at(cache, TABLE, request, p) for p in range(length if request >= 0 else 0)]
        for h in range(H):
            want, total = attention(q[t, h].tolist(), keys, 0.3, C)
            torch.testing.assert_close(out[t, h], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)
            assert math.isclose(float(lse[t, h]), total, rel_tol=1e-12, abs_tol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keys", [1, 63, 64, 65])
def test_equals_the_sparse_op_bit_by_bit(keys: int, dtype: torch.dtype) -> None:
    size = 5
    pages = -(-keys // size)
    q, cache = normal(4, H, C + R, seed=3, dtype=dtype), normal(pages, size, C + R, seed=4, dtype=dtype)
    table = torch.arange(pages).flip(0).int()[None]
    lengths = i32([keys, keys // 2, 0, 1])
    indices = torch.arange(keys).expand(4, 1, keys)
    indices = torch.where(indices < lengths[:, None, None], indices, -1).int()
    requests = torch.zeros(4, dtype=torch.int32)
    dense = ops.flash_mla.reference(q, cache, table, requests, lengths, 0.3, C)
    sparse = ops.sparse_flash_attention.reference(q, cache, table, requests, indices, 0.3, C)
    assert torch.equal(dense[0], sparse[0])
    assert torch.equal(dense[1], sparse[1])


def test_causal_rows_equal_torch() -> None:
    length, scale = 33, 0.2
    q, kv = normal(length, H, C + R, seed=5), normal(length, C + R, seed=6)
    out, lse = ops.flash_mla.reference(
        q, kv[None], i32([[0]]), torch.zeros(length).int(), torch.arange(1, length + 1).int(), scale, C
    )
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    scores = torch.einsum("thl,sl->hts", q, kv) * scale
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), kv.expand(H, -1, -1), kv[:, :C].expand(H, -1, -1), mask, scale=scale
    )
    torch.testing.assert_close(out.transpose(0, 1), want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse.T, scores.masked_fill(~mask, -math.inf).logsumexp(-1), rtol=1e-12, atol=1e-13)


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 1, 2), 1e4)
    out, lse = ops.flash_mla.reference(q, torch.full((1, 3, 2), 1e4), i32([[0]]), i32([0]), i32([3]), 1.0, 1)
    assert out.item() == 1e4
    assert math.isclose(lse.item(), 2e8 + math.log(3), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({4: i32([7, 2, 3, 0, 4, 5])}, r"kv_lens\[0\] is 7"),
        ({4: i32([-1, 2, 3, 0, 4, 5])}, r"kv_lens\[0\] is -1"),
        ({3: i32([2, 0, -1, 1, 0, 0])}, r"request_ids\[0\] is 2"),
        ({2: i32([[4, 1], [0, 5]])}, r"block_table\[1\]"),
    ],
)
def test_bad_values_are_refused(change: dict[int, Tensor], words: str) -> None:
    given = [change.get(i, a) for i, a in enumerate(arguments())]
    with pytest.raises(ContractError, match=words):
        ops.flash_mla.reference(*given, 0.3, C)


def test_padding_rows_may_hold_any_length() -> None:
    q, cache, *_ = arguments()
    out, lse = ops.flash_mla.reference(q[:1], cache, TABLE, i32([-1]), i32([1000]), 0.3, C)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_gradients() -> None:
    q, cache, *rest = arguments()
    cache = torch.nan_to_num(cache)
    check_backward(ops.flash_mla, q, cache, *rest, 0.3, C, "plain")

    def attend(q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ops.flash_mla.reference(q, cache, *rest, 0.3, C)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(attend, (q.requires_grad_(), cache.requires_grad_()))
    opcheck(ops.flash_mla, leaf(6, H, C + R), leaf(5, 3, C + R, seed=1), TABLE, REQUESTS, LENGTHS, 0.3, C, "plain")
