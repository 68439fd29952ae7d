"""Sort tokens by expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops.moe._sort import absent_ids, sorted_slots
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, a, n, e = axes["T"], axes["A"], axes["N"], axes["E"]
    return Cost(0, size * t * n + 4 * t * a, size * t * a * n + 4 * (t * a + e + 1))


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    return {"ids": absent_ids(axes["T"], axes["A"], axes["E"], generator), "num_experts": axes["E"]}


def every_slot_once(arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """Each present slot has one row, under its own expert; the rest is zero."""
    rows, row_ids, offsets = outs
    ids, count = arguments["ids"].reshape(-1), int(offsets[-1])
    slots = row_ids[:count].long()
    assert torch.equal(slots.sort().values, (ids >= 0).nonzero()[:, 0]), "row_ids are not the present slots"
    owner = torch.repeat_interleave(offsets.diff().long())
    assert torch.equal(ids[slots].long(), owner), "a row lies outside its expert's range"
    assert not rows[count:].any(), "a row past the last is not zero"
    assert bool((row_ids[count:] == -1).all()), "a row past the last has a slot"


def backward(grad_rows: Tensor, x: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """Each token sums the gradients of its copies, experts ascending."""
    order, offsets = sorted_slots("moe_permute", ids, num_experts)
    token = order[: int(offsets[-1])] // ids.shape[1]
    acc = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return acc.index_add_(0, token, grad_rows[: len(token)].to(acc.dtype)).to(x.dtype)


@op(
    inputs={"x": "a[T, N]", "ids": "i32[T, A]", "num_experts": "= E"},
    outputs={"rows": "a[T*A, N]", "row_ids": "i32[T*A]", "offsets": "i32[E+1]"},
    rows=None,
    grad=("x",),
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        geometries=(
            {"T": 0, "A": 2, "N": 7, "E": 4},
            {"T": 63, "A": 2, "N": 20, "E": 5},
            {"T": 64, "A": 3, "N": 65, "E": 8},
            {"T": 65, "A": 8, "N": 12, "E": 256},
            {"T": 2, "A": 8, "N": 6144, "E": 256},
        ),
        properties=(every_slot_once,),
        exact_outputs=("rows", "row_ids", "offsets"),
    ),
)
def moe_permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once per expert it goes to, sorted by expert, equal experts in the order of tokens.

    Args:
        x: [T, N] activations.
        ids: i32 [T, A] expert of each slot, -1 = none.
        num_experts: E.

    Returns:
        rows [T*A, N]: the copies, then zeros; row_ids i32 [T*A]: flat slot `t * A + j` of each row, -1 past the last
        copy; offsets i32 [E+1]: expert e owns rows offsets[e] to offsets[e+1]. T = 0 is legal.

    Raises:
        ContractError: an id is neither -1 nor in [0, E) or stands twice in a row; shapes, dtypes or devices do not fit.
    """
    order, offsets = sorted_slots("moe_permute", ids, num_experts)
    count = int(offsets[-1])
    rows = x.new_zeros(ids.numel(), x.shape[1])
    rows[:count] = x[order[:count] // max(1, ids.shape[1])]
    row_ids = torch.full((ids.numel(),), -1, dtype=torch.int32, device=x.device)
    row_ids[:count] = order[:count].to(torch.int32)
    return rows, row_ids, offsets.to(torch.int32)
