"""The forward of GlmMoeDsaAttention on our ops: MLA in absorbed form over selected keys, indexer included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaIndexer, GlmMoeDsaRMSNorm

from glm5sdk.core.errors import ContractError
from glm5sdk.integrations.transformers.cache import RowLayer, row_layer, the_cache
from glm5sdk.integrations.transformers.replaced import Replaced, plain_linear, plain_norm
from glm5sdk.integrations.transformers.visibility import Step, StepReader
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.mla import LatentAttention, LatentAttentionSizes
from glm5sdk.nn.rope import RopeTable

__all__ = ["AttentionForward"]

PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
INDEX_PROJECTIONS = ("wq_b", "wk", "weights_proj")


class AttentionForward(Replaced):
    """Stands for one attention module: a LatentAttention of ours computes with the module's own parameters.

    Args:
        module: transformers' attention.
        sizes: of the layer.
        rope: the model's table, shared by its layers.
        reader: reads masks, shared by the model's layers.
    """

    module: GlmMoeDsaAttention

    def __init__(self, module: nn.Module, sizes: LatentAttentionSizes, rope: RopeTable, reader: StepReader) -> None:
        super().__init__(module)
        self.rope, self.reader = rope, reader
        with torch.device("meta"):
            self.twin = LatentAttention(sizes, self.module.layer_idx, self.module.indexer is not None)
        self._bind()

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor | None]:
        """As GlmMoeDsaAttention.forward; the selection that layers hand on is ours, i32 [tokens, 1, K].

        The cache may come as `past_key_values`, as older versions call it.
        """
        cache = the_cache(cache, kwargs)
        trains = self._bind()
        batch, new, _ = hidden_states.shape
        trains = torch.is_grad_enabled() and (trains or hidden_states.requires_grad)
        if trains and self.module.training and self.module.attention_dropout:
            raise ContractError(
                f"accelerated attention: attention_dropout is {self.module.attention_dropout}, needs 0 to train"
            )
        if self.module.indexer is None and prev_topk_indices is None:
            raise ContractError("accelerated attention: a shared layer got no selection, needs a full layer before it")
        if cache is None:
            step = self.reader(attention_mask, position_ids, batch, 0, 0)
            out_TN, context = self._run(hidden_states, step, prev_topk_indices)
            return step.spread(out_TN, hidden_states), None, context.indices
        s, layer = self.twin.sizes, self.module.layer_idx
        index_dim = s.index_dim if self.module.indexer is not None else 0
        rows = row_layer(cache, layer, s.latent, s.rope, index_dim)
        if trains:
            if rows.get_seq_length():
                raise ContractError(
                    "accelerated attention: gradients are asked for beside a cache that holds tokens, "
                    "needs torch.no_grad(), or the whole sequence in one pass"
                )
            step = self.reader(attention_mask, position_ids, batch, 0, 0)
            past, _ = rows.reserve(batch, new, hidden_states)
            kept: dict[str, Tensor] = {}
            out_TN, context = self._run(hidden_states, step, prev_topk_indices, kept)
            keep = None if step.rows is None else step.rows.keep
            kv, index = kept[f"layers.{layer}.kv_rows"], kept.get(f"layers.{layer}.index_keys")
            rows.write(past, kv.detach(), None if index is None else index.detach(), keep)
        else:
            past, pool = rows.reserve(batch, new, hidden_states)
            step = self.reader(attention_mask, position_ids, batch, past, pool)
            with torch.no_grad():
                out_TN, context = self._run(hidden_states, step, prev_topk_indices, cache=self._pools(rows))
        rows.advance(past + new)
        return step.spread(out_TN, hidden_states), None, context.indices

    def _run(
        self,
        hidden: Tensor,
        step: Step,
        selected: Tensor | None,
        kept: dict[str, Tensor] | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, ForwardContext]:
        trace = None if kept is None else kept.__setitem__
        context = ForwardContext(step.batch, self.rope(step.table_rows, hidden.device), cache, trace=trace)
        context.indices = selected
        return self.twin(step.pick(hidden), context), context

    def _pools(self, rows: RowLayer) -> SimpleNamespace:
        """This one layer's pools, as a LatentCache would name them."""
        layer = self.module.layer_idx
        index = rows.index_pool() if self.module.indexer is not None else None
        return SimpleNamespace(
            kv={layer: rows.kv_pool()}, index={layer: index}, kv_format="plain", index_format="plain"
        )

    def _bind(self) -> bool:
        """Let the twin compute with the module's parameters of this moment; whether any of them trains."""
        module, twin = self.module, self.twin
        pairs = [(twin._modules[name], plain_linear(module, name)) for name in PROJECTIONS]
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            norm = plain_norm(module, name, GlmMoeDsaRMSNorm)
            if norm.variance_epsilon != twin.sizes.eps:
                raise ContractError(
                    f"accelerated attention: {name} has eps {norm.variance_epsilon}, needs {twin.sizes.eps}"
                )
            pairs.append((twin._modules[name], norm.weight))
        trains = any(weight.requires_grad for _, weight in pairs)
        if twin.indexer is not None:
            indexer = plain_norm(module, "indexer", GlmMoeDsaIndexer)
            pairs += [(twin.indexer._modules[name], plain_linear(indexer, name)) for name in INDEX_PROJECTIONS]
            norm = plain_norm(indexer, "k_norm", nn.LayerNorm)
            pairs.append((twin.indexer.k_norm, norm.weight))
            twin.indexer.k_norm._parameters["bias"] = norm.bias
        for own, weight in pairs:
            own._parameters["weight"] = weight
        return trains
