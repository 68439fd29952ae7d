"""The indexer's projections and the write of its key, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import write_index_rows
from glm5sdk.ops._checks import check_slots
from glm5sdk.ops._test_inputs import index_cache_inputs, rope_inputs, slot_inputs
from glm5sdk.ops.indexer.cache_index_keys import cache_index_keys
from glm5sdk.ops.indexer.indexer_project import GEOMETRIES, INPUTS, indexer_project
from glm5sdk.ops.indexer.indexer_project import cost as project_cost
from glm5sdk.registry import Cost, TestRules, WeightLike, op
from glm5sdk.registry.formats import page_size_of


def cost(axes: Mapping[str, int], size: int) -> Cost:
    return project_cost(axes, size) + Cost(0, 8 * axes["T"], 0)  # the key goes to the cache instead of an output


def make_inputs(
    axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    cache = index_cache_inputs(axes, dtype, generator, exact, format)
    return {**cache, **rope_inputs(axes, dtype, generator, exact), **slot_inputs(axes, generator)}


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
    index_cache: Tensor,
    slots: Tensor,
    interleaved: bool,
    eps: float,
    format: str,
) -> tuple[Tensor, Tensor]:
    iq, ik, iw = indexer_project(
        hidden, q_latent, w_q, w_k, k_norm_weight, k_norm_bias, w_weights, positions, cos_sin, interleaved, eps
    )
    cache_index_keys(ik, index_cache, slots, format)
    return iq, iw


@op(
    inputs={**INPUTS, "index_cache": "index_cache[P, S, Di]", "slots": "i64[T]"},
    outputs={"iq": "a[T, Hi, Di]", "iw": "f32[T, Hi]"},
    rows="T",
    where=("R % 2 == 0", "R <= Di"),
    mutates=("index_cache",),
    composed=composed,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"R": (2, 2), "Di": (2, 9), "Pmax": (1, 9), "P": (0, 3)},
        geometries=tuple({**g, "P": 3, "S": s} for g, s in zip(GEOMETRIES, (64, 1, 9, 2), strict=True)),
        options=({"interleaved": True}, {"interleaved": False}),
    ),
)
def indexer_preprocess(
    hidden: Tensor,
    q_latent: Tensor,
    w_q: WeightLike,
    w_k: WeightLike,
    k_norm_weight: Tensor,
    k_norm_bias: Tensor,
    w_weights: WeightLike,
    positions: Tensor,
    cos_sin: Tensor,
    index_cache: Tensor,
    slots: Tensor,
    interleaved: bool = True,
    eps: float = 1e-6,
    format: str = "plain",
) -> tuple[Tensor, Tensor]:
    """`indexer_project`, then its key written to the cache. Inference only.

    Args:
        hidden: [T, N] activations, after the layer's norm.
        q_latent: [T, Q] from `mla_preprocess`.
        w_q: [Hi * Di, Q].
        w_k: [Di, N].
        k_norm_weight: [Di].
        k_norm_bias: [Di].
        w_weights: [Hi, N].
        positions: [T] i64, 0 <= position < Pmax.
        cos_sin: [Pmax, R] f32, cosines then sines; R even and at most Di.
        index_cache: see `cache_index_keys`. Written in place.
        slots: [T] i64, page * S + offset; -1 = do not write.
        interleaved: how rope pairs elements.
        eps: of the key's norm.
        format: of the cache.

    Returns:
        iq [T, Hi, Di], dtype of hidden, and iw [T, Hi] f32; also for rows that are not written. Rows are independent.

    Raises:
        ContractError: as `indexer_project` and `cache_index_keys`; nothing was written.
    """
    size = page_size_of("index_cache", format, tuple(index_cache.shape), w_k.shape[0])
    check_slots("indexer_preprocess", slots, index_cache.shape[0] * size)
    iq, ik, iw = indexer_project.reference(
        hidden, q_latent, w_q, w_k, k_norm_weight, k_norm_bias, w_weights, positions, cos_sin, interleaved, eps
    )
    written = slots >= 0
    write_index_rows(index_cache, slots[written], ik[written], format)
    return iq, iw
