"""Writing index keys into their paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import write_index_rows
from glm5sdk.ops._checks import check_slots
from glm5sdk.ops._test_inputs import index_cache_inputs, slot_inputs
from glm5sdk.registry import Cost, TestRules, op
from glm5sdk.registry.formats import page_size_of


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["Di"]
    return Cost(0, size * elements + 8 * axes["T"], size * elements)


def make_inputs(
    axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    return {**index_cache_inputs(axes, dtype, generator, exact, format), **slot_inputs(axes, generator)}


@op(
    inputs={"rows": "a[T, Di]", "index_cache": "index_cache[P, S, Di]", "slots": "i64[T]"},
    outputs={},
    rows="T",
    mutates=("index_cache",),
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"P": (0, 3)},
        geometries=(
            {"T": 5, "Di": 128, "P": 2, "S": 64},
            {"T": 3, "Di": 5, "P": 3, "S": 1},
            {"T": 0, "Di": 3, "P": 1, "S": 3},
        ),
    ),
)
def cache_index_keys(rows: Tensor, index_cache: Tensor, slots: Tensor, format: str = "plain") -> None:
    """Write each token's index key to its slot of the cache.

    Args:
        rows: [T, Di] activations.
        index_cache: `plain` [P, S, Di] in the dtype of rows, or `fp8` u8 [P, S * (Di + 4)]: per page first the S * Di
            e4m3 bytes of all its tokens, then S f32 scales (max(amax, 1e-4) / 448). Written in place.
        slots: [T] i64, page * S + offset; -1 = do not write.
        format: of the cache.

    Raises:
        ContractError: shapes or dtypes do not fit, a slot is outside the pool or named twice; nothing was written.

    Source: the page layout is DeepGEMM's for its paged index logits.
    """
    size = page_size_of("index_cache", format, tuple(index_cache.shape), rows.shape[1])
    check_slots("cache_index_keys", slots, index_cache.shape[0] * size)
    written = slots >= 0
    write_index_rows(index_cache, slots[written], rows[written], format)
