"""The kernels have no races: every schedule, split and number of threads gives the same bits, and the right ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sim_cases import ATTENTION, FEW_SCHEDULES, SCHEDULES, SELECTION, inputs, run

from glm5sdk_sim import _C, BACKEND, impls, scheduled

SMALL = {
    "rms_norm": {"T": 3, "N": 1037},
    "sparse_flash_attention": ATTENTION,
    "topk_indexer_with_scores": SELECTION,
}


def _same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: object) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), what


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("op", SMALL)
def test_every_schedule_gives_the_same_bits(op: str, dtype: str) -> None:
    values = inputs(op, SMALL[op], dtype, seed=3)
    want = run(op, values)
    for schedule in SCHEDULES if dtype == "bf16" else FEW_SCHEDULES:
        with scheduled(*schedule):
            _same(run(op, values), want, schedule)


@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
def test_real_heads_under_few_schedules(format: str) -> None:
    """64 heads of 512 + 64, several blocks of keys, pages out of order."""
    from glm5sdk.ops.mla.sparse_flash_attention import make_inputs

    axes = {"T": 1, "H": 64, "C": 512, "R": 64, "B": 1, "M": 3, "P": 7, "S": 64, "G": 1, "K": 96}
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 64, 576, generator=generator).bfloat16()
    drawn = make_inputs(axes, torch.bfloat16, generator, False, format)
    positions = torch.randperm(192, generator=generator)[:90].sort().values.int()
    drawn["indices"] = torch.cat([positions, torch.full((6,), -1, dtype=torch.int32)])[None, None]
    drawn["request_ids"] = torch.zeros(1, dtype=torch.int32)
    names = ("kv_cache", "block_table", "request_ids", "indices", "scale")
    values = {"q": q, **{name: drawn[name] for name in names}, "v_dim": 512, "format": format}
    out, lse = run("sparse_flash_attention", values)
    for schedule in FEW_SCHEDULES:
        with scheduled(*schedule):
            _same(run("sparse_flash_attention", values), (out, lse), schedule)
    right, right_lse = run("sparse_flash_attention", values, "reference")
    assert (out.double() - right.double()).abs().max() < 2e-2
    assert (lse - right_lse).abs().max() < 1e-5


def _attention_call(values: dict[str, Any], workspace: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    q = values["q"]
    out, lse = torch.empty(*q.shape[:2], values["v_dim"], dtype=q.dtype), torch.empty(*q.shape[:2])
    _C.sparse_flash_attention(*values.values(), out, lse, workspace=workspace)
    return out, lse


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_splits_apart_equal_one_block_that_walks(dtype: str) -> None:
    """1300 selected keys are three splits: a block each and a merge, or one block for all of them."""
    axes = {"T": 3, "H": 3, "C": 32, "R": 8, "B": 2, "M": 30, "P": 70, "S": 50, "G": 1, "K": 1300}
    values = inputs("sparse_flash_attention", axes, dtype, seed=1)
    values["request_ids"] = torch.tensor([1, 0, -1], dtype=torch.int32)
    values["indices"] = torch.arange(1300, dtype=torch.int32).repeat(3, 1, 1)
    values["indices"][1, 0, 600:] = -1
    size = impls.attention_workspace(axes)
    assert size > 0
    before = _C.launch_counts()[1]
    walked = _attention_call(values, None)
    one = _C.launch_counts()[1] - before
    apart = _attention_call(values, torch.empty(size, dtype=torch.uint8))
    assert _C.launch_counts()[1] - before - one > 2 * one, "the splits had no blocks of their own"
    _same(apart, walked, "apart")
    right = run("sparse_flash_attention", values, "reference")
    limit = 1e-5 if dtype == "f32" else 2e-2
    assert all(
        (a.double() - b.double()).nan_to_num(0, 0, 0).abs().max() < limit for a, b in zip(walked, right, strict=True)
    )


def test_parts_apart_equal_one_block_that_walks() -> None:
    """20000 keys are three parts of the selection; equal scores lie on both sides of their borders."""
    axes = {"T": 2, "Hi": 1, "Di": 8, "B": 1, "M": 20, "P": 20, "S": 1000, "K": 700}
    values = inputs("topk_indexer_with_scores", axes, "bf16", seed=2)
    values["iq"] = values["iq"].sign()
    values["index_cache"] = torch.randint(-1, 2, (20, 1000, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
    values["request_ids"] = torch.zeros(2, dtype=torch.int32)
    values["kv_lens"] = torch.tensor([20000, 9000], dtype=torch.int32)
    values["format"] = "plain"
    results = []
    for workspace in (None, torch.empty(impls.selection_workspace(axes), dtype=torch.uint8)):
        indices, scores = torch.empty(2, 1, 700, dtype=torch.int32), torch.empty(2, 1, 700)
        _C.topk_indexer_with_scores(*values.values(), indices, scores, workspace=workspace)
        results.append((indices, scores))
    _same(results[0], results[1], "apart")
    _same(results[0], run("topk_indexer_with_scores", values, "reference"), "the only answer")


def test_blocks_on_several_threads_give_the_same_bits() -> None:
    values = inputs("sparse_flash_attention", ATTENTION, "bf16", seed=3)
    before = BACKEND.threads()
    want = run("sparse_flash_attention", values)
    try:
        BACKEND.threads(3)
        _same(run("sparse_flash_attention", values), want, "threads")
    finally:
        BACKEND.threads(before)
