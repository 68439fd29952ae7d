"""Index queries, index key and head weights of each token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._checks import check_range
from glm5sdk.ops._math import accumulator
from glm5sdk.ops._mla import layer_scaled, rotate
from glm5sdk.ops._test_inputs import rope_inputs
from glm5sdk.ops._weights import project
from glm5sdk.ops.linear import linear
from glm5sdk.ops.norm.layer_norm import layer_norm
from glm5sdk.ops.rope import rope
from glm5sdk.registry import Cost, TestRules, WeightLike, op

INPUTS = {
    "hidden": "a[T, N]",
    "q_latent": "a[T, Q]",
    "w_q": "W[Hi*Di, Q]",
    "w_k": "W[Di, N]",
    "k_norm_weight": "a[Di]",
    "k_norm_bias": "a[Di]",
    "w_weights": "W[Hi, N]",
    "positions": "i64[T]",
    "cos_sin": "f32[Pmax, R]",
}

GEOMETRIES = (
    {"T": 2, "N": 96, "Q": 64, "Hi": 32, "Di": 128, "R": 64, "Pmax": 70},
    {"T": 5, "N": 40, "Q": 20, "Hi": 3, "Di": 9, "R": 6, "Pmax": 9},
    {"T": 65, "N": 9, "Q": 7, "Hi": 1, "Di": 2, "R": 2, "Pmax": 64},
    {"T": 0, "N": 6, "Q": 4, "Hi": 2, "Di": 5, "R": 2, "Pmax": 1},
)


def cost(axes: Mapping[str, int], size: int) -> Cost:
    rows, hidden, q_rank, heads, dim = (axes[a] for a in ("T", "N", "Q", "Hi", "Di"))
    weights = heads * dim * q_rank + (dim + heads) * hidden
    read = size * (weights + rows * (hidden + q_rank) + 2 * dim) + 8 * rows
    return Cost(2 * rows * weights, read, size * rows * (heads + 1) * dim + 4 * rows * heads)


def head_scale(heads: int, dim: int) -> float:
    """Hi^-0.5 * Di^-0.5; a float32 product rounds it to float32."""
    return heads**-0.5 * dim**-0.5


def composed(
    hidden: Tensor,
    q_latent: Tensor,
    w_q: WeightLike,
    w_k: WeightLike,
    k_norm_weight: Tensor,
    k_norm_bias: Tensor,
    w_weights: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dim, rotary, heads = w_k.shape[0], cos_sin.shape[1], w_weights.shape[0]
    q = linear(q_latent, w_q).view(len(hidden), heads, dim)
    k = layer_norm(linear(hidden, w_k), k_norm_weight, k_norm_bias, eps)[:, None]
    iq = torch.cat([rope(q[..., :rotary], positions, cos_sin, interleaved), q[..., rotary:]], dim=-1)
    ik = torch.cat([rope(k[..., :rotary], positions, cos_sin, interleaved), k[..., rotary:]], dim=-1)
    # A tensor times a number is elementwise: it cannot tell one batch from another, so it needs no op of its own.
    iw = linear(hidden, w_weights, out_dtype=torch.float32) * head_scale(heads, dim)
    return iq, ik[:, 0], iw


@op(
    inputs=INPUTS,
    outputs={"iq": "a[T, Hi, Di]", "ik": "a[T, Di]", "iw": "f32[T, Hi]"},
    rows="T",
    where=("R % 2 == 0", "R <= Di"),
    grad=("hidden", "q_latent", "w_q", "w_k", "k_norm_weight", "k_norm_bias", "w_weights"),
    composed=composed,
    cost=cost,
    tests=TestRules(
        make_inputs=rope_inputs,
        ranges={"R": (2, 2), "Di": (2, 9), "Pmax": (1, 9)},
        geometries=GEOMETRIES,
        options=({"interleaved": True}, {"interleaved": False}),
    ),
)
def indexer_project(
    hidden: Tensor,
    q_latent: Tensor,
    w_q: WeightLike,
    w_k: WeightLike,
    k_norm_weight: Tensor,
    k_norm_bias: Tensor,
    w_weights: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the lightning indexer needs of each token.

    iq = q_latent w_q per head; ik = layer_norm(hidden w_k); both with rope on their **first** R dims, unlike the main
    attention's last. iw = hidden w_weights * Hi^-0.5 * Di^-0.5, signed and never rounded.

    Args:
        hidden: [T, N] activations, after the layer's norm.
        q_latent: [T, Q] from `mla_project`.
        w_q: [Hi * Di, Q].
        w_k: [Di, N].
        k_norm_weight: [Di].
        k_norm_bias: [Di].
        w_weights: [Hi, N].
        positions: [T] i64, 0 <= position < Pmax.
        cos_sin: [Pmax, R] f32, cosines then sines; R even and at most Di.
        interleaved: how rope pairs elements: true for GLM-5, false for DeepSeek-V3.2.
        eps: of the key's norm, 1e-6 whatever the other norms use.

    Returns:
        iq [T, Hi, Di] and ik [T, Di], dtype of hidden; iw [T, Hi] f32. Rows are independent.

    Raises:
        ContractError: shapes or dtypes do not fit, R is odd or above Di, or a position is outside the table.

    Source: DeepSeek-V3.2-Exp; weights as in transformers' GlmMoeDsaIndexer.
    """
    a, dim, rotary, heads = hidden.dtype, w_k.shape[0], cos_sin.shape[1], w_weights.shape[0]
    check_range("indexer_project", "positions", positions, 0, cos_sin.shape[0], "rows of cos_sin")
    q = project(q_latent, w_q).to(a).view(len(hidden), heads, dim)
    k = layer_scaled(project(hidden, w_k).to(a), k_norm_weight, k_norm_bias, eps)[:, None]
    iq = torch.cat([rotate(q[..., :rotary], positions, cos_sin, interleaved), q[..., rotary:]], dim=-1)
    ik = torch.cat([rotate(k[..., :rotary], positions, cos_sin, interleaved), k[..., rotary:]], dim=-1)
    iw = project(hidden, w_weights).to(accumulator(a)) * head_scale(heads, dim)
    return iq, ik[:, 0], iw
