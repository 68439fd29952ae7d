"""The lightning indexer: which keys each token attends to."""

from __future__ import annotations

from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.layers import LayerNorm, Linear

__all__ = ["Indexer", "IndexerState"]

K_NORM_EPS = 1e-6  # fixed by the architecture, whatever rms_norm_eps is


class IndexerState:
    """The indexer's view of one step: queries, signed head weights and the keys to search."""

    def __init__(self, iq: Tensor, iw: Tensor, keys: Tensor, format: str) -> None:
        self.iq, self.iw, self.keys, self.format = iq, iw, keys, format


class Indexer(nn.Module):
    """score[s, t] = sum_h w[s, h] relu(q[s, h] . k[t]); the top K keys of each token, one selection for all heads.

    Args:
        hidden: N.
        q_latent: Q.
        heads, dim: Hi, Di.
        interleaved: rope in pairs (GLM) or half-split (DeepSeek-V3.2), on the first R of Di.
    """

    def __init__(self, hidden: int, q_latent: int, heads: int, dim: int, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.wq_b = Linear(q_latent, heads * dim)
        self.wk = Linear(hidden, dim)
        self.k_norm = LayerNorm(dim, K_NORM_EPS)
        self.weights_proj = Linear(hidden, heads)

    def forward(self, hidden_TN: Tensor, q_latent_TQ: Tensor, layer: int, context: ForwardContext) -> IndexerState:
        """Project, and write the keys where the context keeps them. Inputs are detached: top-k has no gradient."""
        batch, cache = context.batch, context.cache
        arguments = (
            hidden_TN.detach(), q_latent_TQ.detach(), self.wq_b.weight, self.wk.weight, self.k_norm.weight,
            self.k_norm.bias, self.weights_proj.weight, batch.positions, context.cos_sin,
        )  # fmt: skip
        options = (self.interleaved, self.k_norm.eps)
        if cache is None:
            iq, ik, iw = ops.indexer_project(*arguments, *options)
            if context.trace is not None:
                context.trace(f"layers.{layer}.index_keys", ik)
            return IndexerState(iq, iw, ik.view(ik.shape[0], 1, ik.shape[1]), "plain")
        keys = cache.index[layer]
        assert keys is not None
        iq, iw = ops.indexer_preprocess(*arguments, keys, batch.slots, *options, cache.index_format)
        return IndexerState(iq, iw, keys, cache.index_format)

    def select(self, state: IndexerState, topk: int, context: ForwardContext) -> Tensor:
        """Indices [T, 1, K] of the selected keys, ascending, then -1."""
        batch = context.batch
        return ops.topk_indexer(
            state.iq.detach(), state.iw.detach(), state.keys.detach(), batch.block_table, batch.request_ids,
            batch.kv_lens, topk, batch.max_kv_len, state.format,
        )  # fmt: skip
