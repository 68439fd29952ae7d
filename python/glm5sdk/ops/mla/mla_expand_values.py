"""From latent attention outputs to each head's values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm5sdk.ops._mla import per_head
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    rows, heads, latent, value = axes["T"], axes["H"], axes["C"], axes["Dv"]
    read = size * heads * (rows * latent + value * latent)
    return Cost(2 * rows * heads * latent * value, read, size * rows * heads * value)


@op(
    inputs={"out": "a[T, H, C]", "w_uv": "W[H, Dv, C]"},
    outputs={"y": "a[T, H*Dv]"},
    rows="T",
    grad=("out", "w_uv"),
    cost=cost,
    tests=TestRules(
        geometries=(
            {"T": 2, "H": 64, "C": 512, "Dv": 256},
            {"T": 3, "H": 2, "C": 192, "Dv": 512},
            {"T": 65, "H": 3, "C": 20, "Dv": 12},
            {"T": 1, "H": 1, "C": 63, "Dv": 65},
            {"T": 0, "H": 2, "C": 4, "Dv": 3},
        ),
    ),
)
def mla_expand_values(out: Tensor, w_uv: WeightLike) -> Tensor:
    """Multiply each head's row by that head's matrix: y[t, h] = a(w_uv[h] @ out[t, h]).

    Args:
        out: [T, H, C] latent outputs of attention.
        w_uv: [H, Dv, C], the value half of kv_b. Absorption is the same op: q_nope and w_uk [H, C, Dn].

    Returns:
        y [T, H * Dv], dtype of out. Accumulated over C ascending, rounded once. Rows are independent.

    Raises:
        ContractError: shapes, dtypes or devices do not fit.
    """
    return per_head(out, w_uv).flatten(1).to(out.dtype)
