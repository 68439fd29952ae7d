"""The lightning indexer's selection, with the scores of what it chose."""

from __future__ import annotations

from torch import Tensor

from glm5sdk.ops._indexer import TOPK_GEOMETRIES, TOPK_INPUTS, compare_selection, select_keys, topk_cost, topk_inputs
from glm5sdk.registry import TestRules, op


@op(
    inputs=TOPK_INPUTS,
    outputs={"indices": "i32[T, 1, K]", "scores": "f32[T, 1, K]"},
    rows="T",
    cost=topk_cost,
    tests=TestRules(
        make_inputs=topk_inputs,
        ranges={"P": (1, 5)},
        geometries=TOPK_GEOMETRIES,
        exact_outputs=("indices", "scores"),
        compare=compare_selection,
    ),
)
def topk_indexer_with_scores(
    iq: Tensor,
    iw: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    kv_lens: Tensor,
    topk: int,
    max_kv_len: int,
    format: str = "plain",
    workspace_bytes: int = 2**28,
) -> tuple[Tensor, Tensor]:
    """Select as `topk_indexer` does and return the scores too.

    Args:
        iq: [T, Hi, Di] index queries.
        iw: [T, Hi] f32 head weights, signed, already scaled.
        index_cache: index keys; see `cache_index_keys` for the formats.
        block_table: [B, M] i32, physical page of each logical page.
        request_ids: [T] i32; -1 = padding row.
        kv_lens: [T] i32, how many keys the row may see.
        topk: K, keys to select.
        max_kv_len: no length of this call is larger; what workspaces are sized by.
        format: of the cache.
        workspace_bytes: rows are chunked so that scores fit; the result does not depend on it.

    Returns:
        indices [T, 1, K] i32 and scores [T, 1, K] f32 of the same entries, -inf where absent or NaN. No gradient.

    Raises:
        ContractError: as `topk_indexer`.
    """
    return select_keys(
        "topk_indexer_with_scores", iq, iw, index_cache, block_table, request_ids, kv_lens, topk, max_kv_len, format,
        workspace_bytes,
    )  # fmt: skip
