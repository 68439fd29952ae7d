"""The lightning indexer's selection: which keys each token attends to."""

from __future__ import annotations

from torch import Tensor

from glm5sdk.ops._indexer import TOPK_GEOMETRIES, TOPK_INPUTS, compare_selection, select_keys, topk_cost, topk_inputs
from glm5sdk.registry import TestRules, op


@op(
    inputs=TOPK_INPUTS,
    outputs={"indices": "i32[T, 1, K]"},
    rows="T",
    cost=topk_cost,
    tests=TestRules(
        make_inputs=topk_inputs,
        ranges={"P": (1, 5)},
        geometries=TOPK_GEOMETRIES,
        exact_outputs=("indices",),
        compare=compare_selection,
    ),
)
def topk_indexer(
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
) -> Tensor:
    """Select the K best keys of each row by score[s] = sum over heads of iw[h] * relu(iq[h] . k[s]).

    Scores are in the accumulator: relu, then times iw, heads added ascending from +0, never rounded. The order is
    total: higher score first, then lower position; NaN counts as -inf and -0 as +0. So the answer is one, always: a
    selection that varies between runs makes reinforcement learning collapse.

    Args:
        iq: [T, Hi, Di] index queries.
        iw: [T, Hi] f32 head weights, signed, already scaled.
        index_cache: index keys; see `cache_index_keys` for the formats.
        block_table: [B, M] i32, physical page of each logical page.
        request_ids: [T] i32; -1 = padding row.
        kv_lens: [T] i32, how many keys the row may see (its position + 1 when causal).
        topk: K, keys to select.
        max_kv_len: no length of this call is larger; what workspaces are sized by.
        format: of the cache.
        workspace_bytes: rows are chunked so that scores fit; the result does not depend on it.

    Returns:
        indices [T, 1, K] i32: logical positions ascending, then -1; all keys of a row that sees at most K. Rows are
        independent. No gradient.

    Raises:
        ContractError: shapes or dtypes do not fit; a request, length or page is out of range.

    Source: DeepSeek-V3.2-Exp's lightning indexer; the order is this project's, made total.
    """
    indices, _ = select_keys(
        "topk_indexer",
        iq,
        iw,
        index_cache,
        block_table,
        request_ids,
        kv_lens,
        topk,
        max_kv_len,
        format,
        workspace_bytes,
    )
    return indices
