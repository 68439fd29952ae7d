"""Writing KV rows into the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import write_kv_rows
from glm5sdk.ops._checks import check_slots
from glm5sdk.ops._test_inputs import kv_cache_inputs, slot_inputs
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * (axes["C"] + axes["R"])
    return Cost(0, size * elements + 8 * axes["T"], size * elements)


def make_inputs(
    axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    return {**kv_cache_inputs(axes, dtype, generator, exact, format), **slot_inputs(axes, generator)}


@op(
    inputs={"rows": "a[T, C+R]", "kv_cache": "kv_cache[P, S, C, R]", "slots": "i64[T]", "v_dim": "= C"},
    outputs={},
    rows="T",
    mutates=("kv_cache",),
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"P": (0, 3)},
        geometries=(
            {"T": 5, "C": 512, "R": 64, "P": 2, "S": 64},
            {"T": 3, "C": 130, "R": 6, "P": 3, "S": 1},
            {"T": 0, "C": 3, "R": 2, "P": 1, "S": 3},
        ),
    ),
)
def concat_and_cache_mla(rows: Tensor, kv_cache: Tensor, slots: Tensor, v_dim: int, format: str = "plain") -> None:
    """Write each token's row, latent then rope part, to its slot of the cache.

    Args:
        rows: [T, C + R] activations: the latent after its norm, the rope part after rope.
        kv_cache: `plain` [P, S, C + R] in the dtype of rows, or `fp8_ds_mla` u8 [P, S, C + 4 ceil(C/128) + 2R]:
            e4m3 latent, one f32 scale per 128 (max(amax, 1e-4) / 448), rope part bf16. Written in place.
        slots: [T] i64, page * S + offset; -1 = do not write.
        v_dim: C.
        format: of the cache.

    Raises:
        ContractError: shapes or dtypes do not fit, a slot is outside the pool or named twice; nothing was written.

    Source: the 656-byte row is FlashMLA's.
    """
    check_slots("concat_and_cache_mla", slots, kv_cache.shape[0] * kv_cache.shape[1])
    written = slots >= 0
    write_kv_rows(kv_cache, slots[written], rows[written], v_dim, format)
