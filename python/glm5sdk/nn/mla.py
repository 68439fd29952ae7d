"""Multi-head latent attention in absorbed form over selected keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.indexer import Indexer, IndexerState
from glm5sdk.nn.layers import Linear, RMSNorm
from glm5sdk.nn.stamp import stamp

__all__ = ["LatentAttention", "LatentAttentionSizes"]


@dataclass(frozen=True)
class LatentAttentionSizes:
    """Sizes and constants of one attention layer; letters as in docs/ops.md.

    Attributes:
        hidden, heads, q_latent, latent, rope, nope, value: N, H, Q, C, R, Dn, Dv.
        scale: of the scores, (Dn + R)^-0.5 unless YaRN says otherwise.
        eps: of the latent norms.
        interleaved: rope pairs stay in place.
        topk: keys selected, K.
        index_heads, index_dim, index_interleaved: of the indexer.
    """

    hidden: int
    heads: int
    q_latent: int
    latent: int
    rope: int
    nope: int
    value: int
    scale: float
    eps: float
    interleaved: bool
    topk: int
    index_heads: int
    index_dim: int
    index_interleaved: bool


class LatentAttention(nn.Module):
    """One attention layer; `has_indexer` says whether it selects keys itself or reuses the last selection."""

    def __init__(self, sizes: LatentAttentionSizes, layer: int, has_indexer: bool) -> None:
        super().__init__()
        s = self.sizes = sizes
        self.layer = layer
        self.q_a_proj = Linear(s.hidden, s.q_latent)
        self.q_a_layernorm = RMSNorm(s.q_latent, s.eps)
        self.q_b_proj = Linear(s.q_latent, s.heads * (s.nope + s.rope))
        self.kv_a_proj_with_mqa = Linear(s.hidden, s.latent + s.rope)
        self.kv_a_layernorm = RMSNorm(s.latent, s.eps)
        self.kv_b_proj = Linear(s.latent, s.heads * (s.nope + s.value))
        self.o_proj = Linear(s.heads * s.value, s.hidden)
        self.indexer = (
            Indexer(s.hidden, s.q_latent, s.index_heads, s.index_dim, s.index_interleaved) if has_indexer else None
        )
        self._absorbed: tuple[tuple[object, ...], Tensor, Tensor] | None = None

    def forward(self, hidden_TN: Tensor, context: ForwardContext) -> Tensor:
        """Attention output [T, N]; writes this layer's cache rows when the context has a cache."""
        s, batch = self.sizes, context.batch
        w_uk, w_uv = self._absorbed_weights()
        q_THL, q_latent_TQ, kv, format = self._project(hidden_TN, w_uk, context)
        state = self.indexer(hidden_TN, q_latent_TQ, self.layer, context) if self._needs_indexer(context) else None
        del q_latent_TQ  # a long prompt's memory peaks in attention: what is done with goes before
        where = (batch.block_table, batch.request_ids)
        if context.selection == "dense":
            out_THC, lse_TH = ops.flash_mla(q_THL, kv, *where, batch.kv_lens, s.scale, s.latent, format)
            chosen = None
        else:
            chosen = self._select(state, context)
            if not context.collect_kl:
                state = None
            out_THC, lse_TH = ops.sparse_flash_attention(q_THL, kv, *where, chosen, s.scale, s.latent, format)
        if context.collect_kl and state is not None:
            context.kl[self.layer] = ops.indexer_kl(
                state.iq, state.iw, state.keys, q_THL.detach(), kv.detach(), lse_TH.detach(), *where, batch.kv_lens,
                chosen, s.scale, s.latent, format,
            )  # fmt: skip
        return self.o_proj(ops.mla_expand_values(out_THC, w_uv))

    def _project(self, hidden_TN: Tensor, w_uk: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor, str]:
        """Absorbed queries, query latent, and the cache to attend to."""
        s, batch, cache = self.sizes, context.batch, context.cache
        if any(m.adapter is not None for m in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa)):
            return self._project_apart(hidden_TN, w_uk, context)
        arguments = (
            hidden_TN, self.q_a_proj.weight, self.q_a_layernorm.weight, self.q_b_proj.weight,
            self.kv_a_proj_with_mqa.weight, self.kv_a_layernorm.weight, w_uk, batch.positions, context.cos_sin,
        )  # fmt: skip
        if cache is None:
            q, kv, q_latent = ops.mla_project(*arguments, s.eps, s.interleaved)
            if context.trace is not None:
                context.trace(f"layers.{self.layer}.kv_rows", kv)
            return q, q_latent, kv.view(kv.shape[0], 1, kv.shape[1]), "plain"
        pool = cache.kv[self.layer]
        q, q_latent = ops.mla_preprocess(*arguments, pool, batch.slots, s.eps, s.interleaved, cache.kv_format)
        return q, q_latent, pool, cache.kv_format

    def _project_apart(
        self, hidden_TN: Tensor, w_uk: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, str]:
        """As `_project`, from the ops that it fuses, because adapters add to the projections between them."""
        s, batch, cache = self.sizes, context.batch, context.cache
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_TN))
        q = self.q_b_proj(q_latent).view(-1, s.heads, s.nope + s.rope)
        kv = self.kv_a_proj_with_mqa(hidden_TN)
        where = (batch.positions, context.cos_sin, s.interleaved)
        absorbed = ops.mla_expand_values(q[..., : s.nope], w_uk).view(-1, s.heads, s.latent)
        q_THL = torch.cat([absorbed, ops.rope(q[..., s.nope :], *where)], dim=-1)
        k_rope = ops.rope(kv[:, None, s.latent :], *where)[:, 0]
        rows = torch.cat([self.kv_a_layernorm(kv[:, : s.latent]), k_rope], dim=-1)
        if cache is None:
            return q_THL, q_latent, rows[:, None], "plain"
        pool = cache.kv[self.layer]
        ops.concat_and_cache_mla(rows, pool, batch.slots, s.latent, cache.kv_format)
        return q_THL, q_latent, pool, cache.kv_format

    def _needs_indexer(self, context: ForwardContext) -> bool:
        """Dense passes without a cache need no index keys; a cache always gets them: later steps may search it."""
        return self.indexer is not None and (
            context.cache is not None or context.collect_kl or context.selection == "indexer"
        )

    def _select(self, state: IndexerState | None, context: ForwardContext) -> Tensor:
        topk = self.sizes.topk
        if callable(context.selection):
            chosen = context.selection(self.layer, context.batch, topk)
        elif self.indexer is not None and state is not None:
            chosen = self.indexer.select(state, topk, context)
        else:
            assert context.indices is not None, "config validation puts a full layer before every shared one"
            return context.indices
        context.indices = chosen
        if context.trace is not None:
            context.trace(f"layers.{self.layer}.indices", chosen)
        return chosen

    def _absorbed_weights(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, C, Dn] and W_UV [H, Dv, C], the two halves of kv_b_proj; kept between calls when none trains."""
        s, w = self.sizes, self.kv_b_proj.weight
        per_head = w.view(s.heads, s.nope + s.value, s.latent)
        if torch.is_grad_enabled() and w.requires_grad:
            self._absorbed = None  # an optimiser's step is to be expected
            return per_head[:, : s.nope].transpose(1, 2), per_head[:, s.nope :]
        if torch.compiler.is_compiling():  # a graph keeps nothing between calls
            return per_head[:, : s.nope].transpose(1, 2), per_head[:, s.nope :]
        now = stamp(w)
        if self._absorbed is None or self._absorbed[0] != now:
            w_uk = per_head[:, : s.nope].detach().transpose(1, 2).contiguous()
            self._absorbed = (now, w_uk, per_head[:, s.nope :].detach().contiguous())
        return self._absorbed[1], self._absorbed[2]
