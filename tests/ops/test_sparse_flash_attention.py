"""sparse_flash_attention: against loops, empty rows and their gradients, formats, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import attention, i32, integers, key_at, normal
from op_oracle import check_backward, leaf, opcheck
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._cache import read_kv_rows
from glm5sdk.registry.formats import kv_row_bytes

C, R, S, H = 5, 2, 3, 2
TABLE = i32([[4, 1], [0, 3]])  # out of order; page 2 belongs to nobody
REQUESTS = i32([1, 0, -1, 1, 0])
INDICES = i32([[[0, 2, 4, 5]], [[1, 3, -1, -1]], [[0, 1, 2, 3]], [[-1, -1, -1, -1]], [[5, -1, -1, -1]]])


def arguments(dtype: torch.dtype = torch.float64, indices: Tensor = INDICES) -> tuple[Tensor, ...]:
    q, cache = normal(5, H, C + R, seed=1, dtype=dtype), normal(5, S, C + R, seed=2, dtype=dtype)
    cache[2] = math.nan  # must never be read
    return q, cache, TABLE, REQUESTS, indices


def check_against_loops(q: Tensor, cache: Tensor, table: Tensor, requests: Tensor, indices: Tensor) -> None:
    out, lse = ops.sparse_flash_attention.reference(q, cache, table, requests, indices, 0.3, C, "plain")
    for t, request in enumerate(requests.tolist()):
        for h in range(H):
            chosen = indices[t, h % indices.shape[1]].tolist() if request >= 0 else []
            keys = [key_at(cache, table, request, p) for p in chosen if p >= 0]
            want, total = attention(q[t, h].tolist(), keys, 0.3, C)
            torch.testing.assert_close(out[t, h], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)
            assert math.isclose(float(lse[t, h]), total, rel_tol=1e-12, abs_tol=1e-13)


def test_equals_loops() -> None:
    check_against_loops(*arguments())


def test_one_selection_per_head() -> None:
    per_head = torch.cat([INDICES, INDICES.flip(0)], dim=1)
    check_against_loops(*arguments(indices=per_head))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5sdk.ops.mla import sparse_flash_attention as module

    want = ops.sparse_flash_attention.reference(*arguments(), 0.3, C)
    groups = module.key_groups
    monkeypatch.setattr(module, "key_groups", lambda *a, **k: groups(*a, **{**k, "budget": 1}))
    got = ops.sparse_flash_attention.reference(*arguments(), 0.3, C)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-13, atol=0)


def test_bf16_is_rounded_once() -> None:
    q, cache, *rest = arguments(torch.bfloat16)
    out, lse = ops.sparse_flash_attention.reference(q, cache, *rest, 0.3, C)
    want, want_lse = ops.sparse_flash_attention.reference(q.double(), cache.double(), *rest, 0.3, C)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert ((out.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_fp8_cache_reads_as_its_values() -> None:
    latent, rope = 130, 4
    q, rows = normal(2, H, latent + rope, seed=3, dtype=torch.float32), normal(6, latent + rope, seed=4).float()
    cache = torch.zeros(2, 3, kv_row_bytes(latent, rope), dtype=torch.uint8)
    ops.concat_and_cache_mla.reference(rows, cache, torch.arange(6), latent, "fp8_ds_mla")
    plain = read_kv_rows(cache, torch.arange(6), latent, "fp8_ds_mla", torch.float32).view(2, 3, -1)
    rest = (i32([[1, 0]]), i32([0, 0]), i32([[[0, 3, 4]], [[1, 2, -1]]]), 0.1, latent)
    got = ops.sparse_flash_attention.reference(q, cache, *rest, "fp8_ds_mla")
    want = ops.sparse_flash_attention.reference(q, plain, *rest, "plain")
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_head_geometry_of_glm5() -> None:
    q, cache = normal(2, 64, 576, seed=5, dtype=torch.bfloat16), normal(3, 64, 576, seed=6, dtype=torch.bfloat16)
    indices = torch.stack([torch.arange(0, 130)[:128], torch.arange(64, 192)]).int()[:, None]
    out, _ = ops.sparse_flash_attention.reference(q, cache, i32([[2, 0, 1]]), i32([0, 0]), indices, 1 / 16, 512)
    keys = [key_at(cache, i32([[2, 0, 1]]), 0, p) for p in range(64, 192)]
    want, _ = attention(q[1, 63].double().tolist(), keys, 1 / 16, 512)
    torch.testing.assert_close(out[1, 63].double(), torch.tensor(want, dtype=torch.float64), rtol=2**-7, atol=1e-4)


def test_nothing_at_all() -> None:
    out, lse = ops.sparse_flash_attention.reference(
        torch.ones(0, H, C + R), torch.ones(1, S, C + R), i32([[0]]), i32([]), torch.zeros(0, 1, 2).int(), 1.0, C
    )
    assert out.shape == (0, H, C)
    assert lse.shape == (0, H)
    out, lse = ops.sparse_flash_attention.reference(
        torch.ones(2, H, C + R),
        torch.ones(0, S, C + R),
        torch.zeros(0, 0).int(),
        i32([-1, -1]),
        i32([[[0]], [[0]]]),
        1.0,
        C,
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({3: i32([2, 0, -1, 1, 0])}, r"request_ids\[0\] is 2"),
        ({3: i32([-2, 0, -1, 1, 0])}, r"request_ids\[0\] is -2"),
        ({4: INDICES + 3}, r"indices\[0, 0, \d\] is"),
        ({4: INDICES.flip(-1)}, "strictly ascending"),
        ({4: i32([[[1, 1]]]).expand(5, 1, 2)}, "strictly ascending"),
        ({2: i32([[4, 1], [5, 3]])}, r"block_table\[1\]"),
        ({2: i32([[4, 1], [-1, 3]])}, r"block_table\[1\]"),
    ],
)
def test_bad_values_are_refused(change: dict[int, Tensor], words: str) -> None:
    given = [change.get(i, a) for i, a in enumerate(arguments())]
    with pytest.raises(ContractError, match=words):
        ops.sparse_flash_attention.reference(*given, 0.3, C)


def test_a_page_that_no_selection_touches_may_be_absent() -> None:
    q, cache, _, _, _ = arguments()
    ops.sparse_flash_attention.reference(q[:1], cache, i32([[4, -1]]), i32([0]), i32([[[0, 2]]]), 0.3, C)


@pytest.mark.parametrize("indices", [INDICES, torch.cat([INDICES, INDICES.flip(0)], dim=1)])
def test_gradients(indices: Tensor) -> None:
    q, cache, *rest = arguments(indices=indices)
    cache = torch.nan_to_num(cache)
    check_backward(ops.sparse_flash_attention, q, cache, *rest, 0.3, C, "plain")

    def attend(q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ops.sparse_flash_attention.reference(q, cache, *rest, 0.3, C)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(attend, (q.requires_grad_(), cache.requires_grad_()))


def test_gradients_of_shared_pages_add_up_before_they_are_rounded() -> None:
    cache = torch.ones(1, 1, C + R, dtype=torch.bfloat16)
    q = integers(300, 1, C + R, seed=7, dtype=torch.bfloat16)
    table, requests, indices = torch.zeros(300, 1).int(), torch.arange(300).int(), torch.zeros(300, 1, 1).int()
    one = torch.ones(300, 1, C, dtype=torch.bfloat16)
    lse = torch.zeros(300, 1)
    backward = ops.sparse_flash_attention.backward
    assert backward is not None
    _, grad = backward.reference(one, lse, q, cache, table, requests, indices, 1.0, C, "plain")
    assert grad[0, 0, :C].tolist() == [float(torch.tensor(300.0).bfloat16())] * C  # bf16 sums would stop at 256


def test_torch_view() -> None:
    q, cache = leaf(5, H, C + R), leaf(5, S, C + R, seed=1)
    opcheck(ops.sparse_flash_attention, q, cache, TABLE, REQUESTS, INDICES, 0.3, C, "plain")
