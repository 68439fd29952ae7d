"""Everything before attention and the cache write, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import write_kv_rows
from glm5sdk.ops._checks import check_slots
from glm5sdk.ops._test_inputs import kv_cache_inputs, rope_inputs, slot_inputs
from glm5sdk.ops.mla.concat_and_cache_mla import concat_and_cache_mla
from glm5sdk.ops.mla.mla_project import GEOMETRIES, INPUTS, mla_project
from glm5sdk.ops.mla.mla_project import cost as project_cost
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    return project_cost(axes, size) + Cost(0, 8 * axes["T"], 0)  # the row goes to the cache instead of an output


def make_inputs(
    axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    cache = kv_cache_inputs(axes, dtype, generator, exact, format)
    return {**cache, **rope_inputs(axes, dtype, generator, exact), **slot_inputs(axes, generator)}


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
    kv_cache: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
    format: str,
) -> tuple[Tensor, Tensor]:
    q, kv, q_latent = mla_project(
        hidden, w_q_a, q_a_norm, w_q_b, w_kv_a, kv_a_norm, w_uk, positions, cos_sin, eps, interleaved
    )
    concat_and_cache_mla(kv, kv_cache, slots, w_uk.shape[1], format)
    return q, q_latent


@op(
    inputs={**INPUTS, "kv_cache": "kv_cache[P, S, C, R]", "slots": "i64[T]"},
    outputs={"q": "a[T, H, C+R]", "q_latent": "a[T, Q]"},
    rows="T",
    where=("R % 2 == 0",),
    mutates=("kv_cache",),
    composed=composed,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"R": (2, 2), "Pmax": (1, 9), "P": (0, 3)},
        geometries=tuple({**g, "P": 3, "S": s} for g, s in zip(GEOMETRIES, (64, 1, 9, 2), strict=True)),
        options=({"interleaved": True}, {"interleaved": False}),
    ),
)
def mla_preprocess(
    hidden: Tensor,
    w_q_a: WeightLike,
    q_a_norm: Tensor,
    w_q_b: WeightLike,
    w_kv_a: WeightLike,
    kv_a_norm: Tensor,
    w_uk: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    eps: float = 1e-5,
    interleaved: bool = True,
    format: str = "plain",
) -> tuple[Tensor, Tensor]:
    """`mla_project`, then its row written to the cache: the work of thirteen kernels in one call. Inference only.

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
        kv_cache: see `concat_and_cache_mla`. Written in place.
        slots: [T] i64, page * S + offset; -1 = do not write.
        eps: of both latent norms.
        interleaved: how rope pairs elements; see `rope`.
        format: of the cache.

    Returns:
        q [T, H, C + R] and q_latent [T, Q], dtype of hidden; also for rows that are not written. Rows are independent.

    Raises:
        ContractError: as `mla_project` and `concat_and_cache_mla`; nothing was written.

    Source: MLAPO of CANN's operator library, which fuses the same thirteen steps.
    """
    check_slots("mla_preprocess", slots, kv_cache.shape[0] * kv_cache.shape[1])
    q, kv, q_latent = mla_project.reference(
        hidden, w_q_a, q_a_norm, w_q_b, w_kv_a, kv_a_norm, w_uk, positions, cos_sin, eps, interleaved
    )
    written = slots >= 0
    write_kv_rows(kv_cache, slots[written], kv[written], w_uk.shape[1], format)
    return q, q_latent
