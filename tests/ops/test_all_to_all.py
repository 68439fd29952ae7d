"""all_to_all_dispatch and all_to_all_combine: one process against the sorting ops, two processes against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import CapacityError, ContractError

EXPERTS, SLOTS, WIDTH = 6, 3, 10


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :SLOTS].int()
    ids[torch.rand(count, SLOTS, generator=generator) < 0.2] = -1
    return x, ids, torch.rand(count, SLOTS, generator=generator)


def expert(rows: Tensor, ids: Tensor) -> Tensor:
    """Stands in for an expert: another rounded product for each, and a row's bits depend on that row alone."""
    return rows * (1 + ids.clamp(min=0)[:, None] / 7).bfloat16()


def without_parallelism(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows, row_ids, _ = ops.moe_permute.reference(x, ids, EXPERTS)
    owner = ids.reshape(-1)[row_ids.long().clamp(min=0)]
    return ops.moe_unpermute.reference(expert(rows, owner), row_ids, weights)


def through_the_group(x: Tensor, ids: Tensor, weights: Tensor, group: str, ranks: int, rank: int) -> Tensor:
    local = EXPERTS // ranks
    rows, row_ids, row_weights, counts, handle = ops.all_to_all_dispatch(x, ids, weights, local, group, 200)
    used = int(counts.sum())
    assert counts.tolist() == [int((row_ids == e).sum()) for e in range(local)]
    assert bool((row_ids[used:] == -1).all())
    assert row_weights[:used].all()
    results = expert(rows, row_ids + rank * local)
    results[used:] = torch.nan  # never read
    return ops.all_to_all_combine(results, handle, weights, group)


def test_one_process_equals_sorting() -> None:
    x, ids, weights = tokens(17, 0)
    assert torch.equal(through_the_group(x, ids, weights, "", 1, 0), without_parallelism(x, ids, weights))


def test_rows_arrive_in_the_order_of_slots() -> None:
    x = torch.arange(6.0).view(3, 2)
    ids = torch.tensor([[1, 0], [-1, 1], [0, -1]], dtype=torch.int32)
    weights = torch.arange(6.0).view(3, 2) + 1
    rows, row_ids, row_weights, counts, handle = ops.all_to_all_dispatch(x, ids, weights, 2, "", 5)
    assert rows[:4].tolist() == [[0, 1], [0, 1], [2, 3], [4, 5]]
    assert row_ids.tolist() == [1, 0, 1, 0, -1]
    assert row_weights.tolist() == [1, 2, 4, 5, 0]
    assert counts.tolist() == [2, 2]
    y = ops.all_to_all_combine(rows, handle, weights, "")
    assert torch.equal(y, x * torch.where(ids < 0, 0, weights).sum(1, keepdim=True))


def test_no_tokens() -> None:
    x, ids, weights = tokens(0, 0)
    assert through_the_group(x, ids, weights, "", 1, 0).shape == (0, WIDTH)


def test_refusals() -> None:
    x, ids, weights = tokens(5, 0)
    used = int((ids >= 0).sum())
    with pytest.raises(CapacityError, match=f"capacity of rank 0 is 3, needs {used} rows"):
        ops.all_to_all_dispatch(x, ids, weights, EXPERTS, "", 3)
    with pytest.raises(ContractError, match="expert id on rank 0 is 5"):
        ops.all_to_all_dispatch(x, ids.fill_(5), weights, 5, "", 30)
    with pytest.raises(ContractError, match="group is 'nobody'"):
        ops.all_to_all_dispatch(x, ids, weights, EXPERTS, "nobody", 30)
    rows = ops.all_to_all_dispatch(x.requires_grad_(), tokens(5, 0)[1], weights, EXPERTS, "", 30)[0]
    with pytest.raises(ContractError, match="all_to_all_dispatch: a gradient was asked for, needs none"):
        rows.sum().backward()


def work(rank: int, folder: str) -> None:
    """One of two processes; an assertion that fails here fails the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = dist.group.WORLD.group_name
    try:
        for counts in ([9, 14], [0, 5], [64, 65]):
            shares = [tokens(count, 10 + r) for r, count in enumerate(counts)]
            x, ids, weights = (torch.cat(parts) for parts in zip(*shares, strict=True))
            whole = without_parallelism(x, ids, weights).split(counts)[rank]
            assert torch.equal(through_the_group(*shares[rank], world, 2, rank), whole)

        # The real experts: local weights, one row per slot, weight one; the owner weighs and sums.
        generator = torch.Generator().manual_seed(3)
        gate_up = torch.randn(EXPERTS, 8, WIDTH, generator=generator).double()
        down = torch.randn(EXPERTS, WIDTH, 4, generator=generator).double()
        x, ids, weights = shares[rank]
        x, mine = x.double(), slice(3 * rank, 3 * rank + 3)
        with glm5sdk.use("reference"):
            rows, row_ids, _, _, handle = ops.all_to_all_dispatch(x, ids, weights, 3, world, 300)
            ones = torch.ones(300, 1)
            results = ops.moe_experts(rows, row_ids[:, None], ones, gate_up[mine], down[mine])
            got = ops.all_to_all_combine(results, handle, weights, world)
            want = ops.moe_experts(x, ids, weights, gate_up, down)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

        # Rank 1 has no room: both ranks hear it, with the numbers, and the group still works afterwards.
        x, ids, weights = tokens(6, rank)
        ids.fill_(5)
        with pytest.raises(CapacityError, match="capacity of rank 1 is 20, needs 36 rows"):
            ops.all_to_all_dispatch(x, ids, weights, 3, world, [100, 20][rank])
        ids.fill_([2, 6][rank])
        with pytest.raises(ContractError, match="expert id on rank 1 is 6"):
            ops.all_to_all_dispatch(x, ids, weights, 3, world, 100)
        assert bool(through_the_group(*tokens(4, rank), world, 2, rank).isfinite().all())
    finally:
        dist.destroy_process_group()


def test_two_processes_equal_one_bit_for_bit(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
