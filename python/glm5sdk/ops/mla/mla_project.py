"""Everything before attention: projections, latent norms, rope and the absorption of the key matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._checks import check_range
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._mla import per_head, rotate, scaled_rms, scaled_rms_backward
from glm5sdk.ops._test_inputs import rope_inputs
from glm5sdk.ops._weights import dequantize_weight, gradient_target, project
from glm5sdk.ops.linear import linear
from glm5sdk.ops.mla.mla_expand_values import mla_expand_values
from glm5sdk.ops.norm.rms_norm import rms_norm
from glm5sdk.ops.rope import rope
from glm5sdk.registry import Cost, TestRules, WeightLike, op

INPUTS = {
    "hidden": "a[T, N]",
    "w_q_a": "W[Q, N]",
    "q_a_norm": "a[Q]",
    "w_q_b": "W[H*Dn+H*R, Q]",
    "w_kv_a": "W[C+R, N]",
    "kv_a_norm": "a[C]",
    "w_uk": "W[H, C, Dn]",
    "positions": "i64[T]",
    "cos_sin": "f32[Pmax, R]",
}

GEOMETRIES = (
    {"T": 2, "N": 96, "Q": 64, "H": 64, "Dn": 192, "C": 512, "R": 64, "Pmax": 70},
    {"T": 5, "N": 40, "Q": 20, "H": 3, "Dn": 12, "C": 20, "R": 6, "Pmax": 9},
    {"T": 65, "N": 9, "Q": 7, "H": 1, "Dn": 5, "C": 3, "R": 2, "Pmax": 64},
    {"T": 0, "N": 6, "Q": 4, "H": 2, "Dn": 3, "C": 4, "R": 2, "Pmax": 1},
)


def cost(axes: Mapping[str, int], size: int) -> Cost:
    rows, hidden, q_rank, heads = axes["T"], axes["N"], axes["Q"], axes["H"]
    nope, latent, rotary = axes["Dn"], axes["C"], axes["R"]
    row = latent + rotary
    weights = hidden * (q_rank + row) + q_rank * heads * (nope + rotary) + heads * nope * latent
    written = size * rows * (heads * row + row + q_rank)
    return Cost(2 * rows * weights, size * (weights + rows * hidden + q_rank + latent) + 8 * rows, written)


def composed(
    hidden: Tensor,
    w_q_a: WeightLike,
    q_a_norm: Tensor,
    w_q_b: WeightLike,
    w_kv_a: WeightLike,
    kv_a_norm: Tensor,
    w_uk: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, latent, nope = w_uk.shape
    q_latent = rms_norm(linear(hidden, w_q_a), q_a_norm, eps)
    q = linear(q_latent, w_q_b).view(len(hidden), heads, nope + cos_sin.shape[1])
    kv = linear(hidden, w_kv_a)
    q_rope = rope(q[..., nope:], positions, cos_sin, interleaved)
    k_rope = rope(kv[:, None, latent:], positions, cos_sin, interleaved)[:, 0]
    absorbed = mla_expand_values(q[..., :nope], w_uk).view(len(hidden), heads, latent)
    k_latent = rms_norm(kv[:, :latent], kv_a_norm, eps)
    return torch.cat([absorbed, q_rope], dim=-1), torch.cat([k_latent, k_rope], dim=-1), q_latent


def backward(
    grad_q: Tensor,
    grad_kv: Tensor,
    grad_q_latent: Tensor,
    hidden: Tensor,
    w_q_a: WeightLike,
    q_a_norm: Tensor,
    w_q_b: WeightLike,
    w_kv_a: WeightLike,
    kv_a_norm: Tensor,
    w_uk: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, ...]:
    """The chain rule by hand: three products are recomputed; a rotation's gradient is the rotation back."""
    a, acc = hidden.dtype, accumulator(hidden.dtype)
    rows, (heads, latent, nope) = len(hidden), w_uk.shape
    back = torch.cat([cos_sin[:, : cos_sin.shape[1] // 2], -cos_sin[:, cos_sin.shape[1] // 2 :]], dim=1)
    raw_q_latent, raw_kv = project(hidden, w_q_a).to(a), project(hidden, w_kv_a).to(a)
    q_latent = scaled_rms(raw_q_latent, q_a_norm, eps)
    q_nope = accumulate(project(q_latent, w_q_b).to(a)).view(rows, heads, nope + cos_sin.shape[1])[..., :nope]
    absorbed, key = accumulate(grad_q[..., :latent]), accumulate(grad_kv)

    d_q = torch.empty(rows, heads, nope + cos_sin.shape[1], dtype=acc, device=hidden.device)
    d_q[..., :nope] = (absorbed.transpose(0, 1) @ dequantize_weight(w_uk, acc)).transpose(0, 1)
    d_q[..., nope:] = rotate(accumulate(grad_q[..., latent:]), positions, back, interleaved)
    d_q = d_q.flatten(1)
    d_q_latent = (d_q @ dequantize_weight(w_q_b, acc)).add_(grad_q_latent)
    d_raw_q_latent, d_q_norm = scaled_rms_backward(d_q_latent, raw_q_latent, q_a_norm, eps)
    d_latent, d_kv_norm = scaled_rms_backward(key[:, :latent], raw_kv[:, :latent], kv_a_norm, eps)
    d_kv = torch.cat([d_latent, rotate(key[:, None, latent:], positions, back, interleaved)[:, 0]], dim=1)
    d_hidden = (d_raw_q_latent @ dequantize_weight(w_q_a, acc)).addmm_(d_kv, dequantize_weight(w_kv_a, acc))

    def outer(w: WeightLike, d: Tensor, x: Tensor) -> Tensor:
        """d^T x, or zero for a quantised weight."""
        return (d.mT @ accumulate(x)).to(a) if isinstance(w, Tensor) else gradient_target(w, acc).to(a)

    d_w_uk = outer(w_uk, absorbed.transpose(0, 1), q_nope.transpose(0, 1))
    return (
        d_hidden.to(a), outer(w_q_a, d_raw_q_latent, hidden), d_q_norm, outer(w_q_b, d_q, q_latent),
        outer(w_kv_a, d_kv, hidden), d_kv_norm, d_w_uk,
    )  # fmt: skip


@op(
    inputs=INPUTS,
    outputs={"q": "a[T, H, C+R]", "kv": "a[T, C+R]", "q_latent": "a[T, Q]"},
    rows="T",
    where=("R % 2 == 0",),
    grad=("hidden", "w_q_a", "q_a_norm", "w_q_b", "w_kv_a", "kv_a_norm", "w_uk"),
    composed=composed,
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=rope_inputs,
        ranges={"R": (2, 2), "Pmax": (1, 9)},
        geometries=GEOMETRIES,
        options=({"interleaved": True}, {"interleaved": False}),
    ),
)
def mla_project(
    hidden: Tensor,
    w_q_a: WeightLike,
    q_a_norm: Tensor,
    w_q_b: WeightLike,
    w_kv_a: WeightLike,
    kv_a_norm: Tensor,
    w_uk: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float = 1e-5,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed queries, the cache row and the query latent of each token.

    q_latent = rms_norm(hidden w_q_a); each head of q_latent w_q_b is [nope Dn | rope R]; its nope part times w_uk is
    the absorbed query. The row is rms_norm of the first C columns of hidden w_kv_a, then rope of the last R. Every
    projection, norm, rotation and the absorption is rounded once, exactly as the single ops round.

    Args:
        hidden: [T, N] activations, after the layer's norm.
        w_q_a: [Q, N].
        q_a_norm: [Q].
        w_q_b: [H * (Dn + R), Q], per head nope rows, then rope rows.
        w_kv_a: [C + R, N], latent rows, then rope rows.
        kv_a_norm: [C].
        w_uk: [H, C, Dn], the key half of kv_b, transposed per head.
        positions: [T] i64, 0 <= position < Pmax.
        cos_sin: [Pmax, R] f32, cosines then sines; R even.
        eps: of both latent norms; 1e-5, or 1e-6 to agree with transformers.
        interleaved: how rope pairs elements; see `rope`.

    Returns:
        q [T, H, C + R], kv [T, C + R] and q_latent [T, Q], which the indexer needs; dtype of hidden. Nothing is
        written in place. Rows are independent.

    Raises:
        ContractError: shapes or dtypes do not fit, R is odd, or a position is outside the table.

    Source: DeepSeek-V2, arXiv 2405.04434; weights as in transformers' GlmMoeDsaAttention.
    """
    check_range("mla_project", "positions", positions, 0, cos_sin.shape[0], "rows of cos_sin")
    a = hidden.dtype
    heads, latent, nope = w_uk.shape
    q_latent = scaled_rms(project(hidden, w_q_a).to(a), q_a_norm, eps)
    q = project(q_latent, w_q_b).to(a).view(len(hidden), heads, nope + cos_sin.shape[1])
    kv = project(hidden, w_kv_a).to(a)
    q_rope = rotate(q[..., nope:], positions, cos_sin, interleaved)
    k_rope = rotate(kv[:, None, latent:], positions, cos_sin, interleaved)[:, 0]
    absorbed = per_head(q[..., :nope], w_uk).to(a)
    k_latent = scaled_rms(kv[:, :latent], kv_a_norm, eps)
    return torch.cat([absorbed, q_rope], dim=-1), torch.cat([k_latent, k_rope], dim=-1), q_latent
