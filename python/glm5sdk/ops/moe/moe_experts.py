"""The routed experts of a layer, fused: sort, two grouped products with a gated activation between, weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._weights import dequantize_weight, experts, gradient_target, project
from glm5sdk.ops.moe._sort import absent_ids, sorted_slots
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, a, n, i, e = axes["T"], axes["A"], axes["N"], axes["I"], axes["E"]
    weights = min(e, t * a) * 3 * n * i
    return Cost(t * a * (6 * n * i + 2 * n), size * (weights + t * n) + 8 * t * a, size * t * n)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """Distinct ascending ids with some absent, and their weights."""
    t, a = axes["T"], axes["A"]
    if exact:
        weights = torch.randint(1, 4, (t, a), generator=generator).float()
    else:
        weights = torch.rand(t, a, generator=generator)
    return {"ids": absent_ids(t, a, axes["E"], generator), "weights": weights.to(accumulator(dtype))}


def composed(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: WeightLike, w_down: WeightLike, limit: float | None = None
) -> Tensor:
    """The same from the ops it fuses, each in its best implementation."""
    from glm5sdk import ops

    rows, row_ids, offsets = ops.moe_permute(x, ids, w_gate_up.shape[0])
    hidden = ops.silu_and_mul(ops.grouped_gemm(rows, w_gate_up, offsets), limit)
    return ops.moe_unpermute(ops.grouped_gemm(hidden, w_down, offsets), row_ids, weights)


def by_expert(ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, its flat slots ascending) for each expert that has any, experts ascending."""
    order, offsets = sorted_slots("moe_experts", ids, num_experts)
    bounds = offsets.tolist()
    for expert in range(num_experts):
        if bounds[expert] < bounds[expert + 1]:
            yield expert, order[bounds[expert] : bounds[expert + 1]]


def gated(h: Tensor, limit: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(clamped gate, clamped up, silu(gate) * up), each rounded to the dtype of h."""
    gate, up = h.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    acc = accumulate(gate)
    return gate, up, (acc * acc.sigmoid()).to(h.dtype) * up


def backward(
    grad_y: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_gate_up: WeightLike,
    w_down: WeightLike,
    limit: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expert by expert in the accumulator: one product is recomputed, five are made, nothing of size E * T exists."""
    acc, slots_per_token = accumulator(x.dtype), ids.shape[1]
    dx, dweights = torch.zeros_like(x, dtype=acc), torch.zeros_like(weights).reshape(-1)
    d_gate_up, d_down = gradient_target(w_gate_up, acc), gradient_target(w_down, acc)
    gate_up, down = experts(w_gate_up), experts(w_down)
    for e, slots in by_expert(ids, len(down)):
        token = slots // slots_per_token
        rows = x[token]
        h = project(rows, gate_up[e]).to(x.dtype)
        gate, up, hidden = (accumulate(v) for v in gated(h, limit))
        g, weight = grad_y[token].to(acc), weights.reshape(-1)[slots, None].to(acc)
        d_hidden = g @ dequantize_weight(down[e], acc)
        dweights[slots] = (d_hidden * hidden).sum(-1).to(dweights.dtype)  # = g . row, without making the row
        d_hidden = d_hidden * weight
        sigmoid = gate.sigmoid()
        d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_up = d_hidden * gate * sigmoid
        if limit is not None:
            raw_gate, raw_up = h.chunk(2, -1)
            d_gate, d_up = d_gate * (raw_gate <= limit), d_up * (raw_up.abs() <= limit)
        d_h = torch.cat((d_gate, d_up), -1)
        if isinstance(w_down, Tensor):
            torch.mm((g * weight).T, hidden, out=d_down[e])
        if isinstance(w_gate_up, Tensor):
            torch.mm(d_h.T, rows.to(acc), out=d_gate_up[e])
        dx.index_add_(0, token, d_h @ dequantize_weight(gate_up[e], acc))
    return dx.to(x.dtype), dweights.view_as(weights), d_gate_up.to(x.dtype), d_down.to(x.dtype)


@op(
    inputs={
        "x": "a[T, N]",
        "ids": "i32[T, A]",
        "weights": "f32[T, A]",
        "w_gate_up": "W[E, 2*I, N]",
        "w_down": "W[E, N, I]",
    },
    outputs={"y": "a[T, N]"},
    rows="T",
    where=("limit is None or limit >= 0",),
    grad=("x", "weights", "w_gate_up", "w_down"),
    composed=composed,
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        geometries=(
            {"T": 0, "A": 2, "N": 7, "I": 5, "E": 4},
            {"T": 1, "A": 1, "N": 1, "I": 1, "E": 1},
            {"T": 63, "A": 2, "N": 20, "I": 12, "E": 5},
            {"T": 64, "A": 3, "N": 65, "I": 63, "E": 8},
            {"T": 65, "A": 8, "N": 40, "I": 20, "E": 9},
            {"T": 3, "A": 2, "N": 6144, "I": 64, "E": 3},
            {"T": 3, "A": 2, "N": 64, "I": 2048, "E": 3},
        ),
        options=({}, {"limit": 1.0}),
    ),
)
def moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: WeightLike, w_down: WeightLike, limit: float | None = None
) -> Tensor:
    """y[t] = sum over t's experts e of weights * (w_down[e] (silu(gate) * up)), gate and up = w_gate_up[e] x[t].

    Rounded to the activation dtype: gate and up; silu; the product; each expert's row. The weighted sum of rows runs in
    the accumulator in ascending expert id and is rounded once.

    Args:
        x: [T, N] activations.
        ids: i32 [T, A] expert of each slot, -1 = none, in any order.
        weights: f32 [T, A] route weights, applied after the second product.
        w_gate_up: [E, 2*I, N], gate rows first; kinds as in `linear`.
        w_down: [E, N, I].
        limit: gate = min(gate, limit) and up = clamp(up, -limit, limit) before the activation.

    Returns:
        y [T, N], dtype of x; a token without experts gets 0. Rows are independent; T = 0 and experts without rows are
        legal. Gradients go to x, weights and plain expert weights, straight through quantised ones.

    Raises:
        ContractError: shapes, dtypes or devices do not fit, an id is no expert or stands twice in a row, or the limit
            is negative.

    Source: rounding as in transformers' GlmMoeDsa experts (grouped path).
    """
    y = torch.zeros_like(x, dtype=accumulator(x.dtype))
    gate_up, down = experts(w_gate_up), experts(w_down)
    for e, slots in by_expert(ids, len(down)):
        token = slots // ids.shape[1]
        hidden = gated(project(x[token], gate_up[e]).to(x.dtype), limit)[2]
        row = project(hidden, down[e]).to(x.dtype)
        y.index_add_(0, token, weights.reshape(-1)[slots, None].to(y.dtype) * accumulate(row))
    return y.to(x.dtype)
