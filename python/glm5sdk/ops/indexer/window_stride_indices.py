"""A fixed sparse pattern: the newest keys and every n-th one before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._test_inputs import choose
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    return Cost(0, 4 * axes["T"], 4 * axes["T"] * axes["K"])


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    kv_lens = torch.randint(200, (axes["T"],), generator=generator).int()
    return {"kv_lens": kv_lens, "window": choose(70, generator), "stride": 1 + choose(70, generator)}


@op(
    inputs={"kv_lens": "i32[T]", "topk": "= K"},
    outputs={"indices": "i32[T, 1, K]"},
    rows="T",
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        geometries=({"T": 5, "K": 64}, {"T": 3, "K": 1}, {"T": 2, "K": 300}, {"T": 0, "K": 4}, {"T": 2, "K": 0}),
    ),
)
def window_stride_indices(kv_lens: Tensor, window: int, stride: int, topk: int) -> Tensor:
    """Select the last `window` keys and, before them, every position that is a multiple of `stride`.

    Args:
        kv_lens: [T] i32, how many keys the row may see; 0 for padding rows.
        window: newest keys always selected, >= 0.
        stride: distance of the global keys, >= 1.
        topk: K; when the pattern has more keys, the oldest are left out.

    Returns:
        indices [T, 1, K] i32: logical positions ascending, then -1, as `topk_indexer` returns them.

    Raises:
        ContractError: a length or the window is negative, or the stride is below 1.
    """
    if window < 0 or stride < 1:
        raise ContractError(f"window_stride_indices: window, stride are {window}, {stride}, need >= 0 and >= 1")
    if bool((kv_lens < 0).any()):
        raise ContractError(f"window_stride_indices: kv_lens is {int(kv_lens.min())}, needs >= 0")
    lengths = kv_lens.long()[:, None]
    start = (lengths - window).clamp_min(0)  # first key of the window
    strided = (start + stride - 1) // stride  # multiples of stride before it
    total = strided + lengths - start
    entry = torch.arange(topk, device=kv_lens.device) + (total - topk).clamp_min(0)
    position = torch.where(entry < strided, entry * stride, start + entry - strided)
    return torch.where(entry < total, position, -1).int()[:, None]
