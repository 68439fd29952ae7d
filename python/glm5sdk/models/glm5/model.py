"""Glm5ForCausalLM: the model that people load, run, train and save."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.decoder import Glm5Model, MtpLayer
from glm5sdk.models.glm5.padding import RaggedRows, flatten_padding
from glm5sdk.nn.cache import CachePools, CacheSizes, LatentCache
from glm5sdk.nn.context import ForwardContext, Selection
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.quantised import weight_kinds
from glm5sdk.nn.rope import RopeTable
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.parallel import ProcessGroup

__all__ = ["Glm5ForCausalLM"]


class Glm5ForCausalLM(nn.Module):
    """A GLM-5 family language model.

    Parameters carry Hugging Face names, but that the routed experts of a layer are fused. Made from a config alone the
    weights are random (normal with initializer_range); see `from_pretrained`.

    Attributes:
        config: what it was made from.
        selection: who chooses the keys of sparse attention: "indexer" (or the config's own pattern), "dense", or a
            function (layer, TokenBatch, K) -> indices i32 [T, 1, K].
    """

    def __init__(self, config: Glm5Config) -> None:
        super().__init__()
        self.config = config
        self.model = Glm5Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.companions: dict[str, Path] = {}  # tokenizer files of the checkpoint it came from
        self.selection: Selection = "indexer" if config.sparse_pattern == "indexer" else self._pattern
        self._rope = RopeTable(config.inverse_frequencies(), config.rope_cos_sin_factor, config.max_position_embeddings)
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        dtype: str = "auto",
        device: str = "cpu",
        latent_norm_eps: float | None = None,
        progress: bool | None = None,
        quantised: bool | None = None,
        expert_slots: int | None = None,
        expert_group: ProcessGroup | None = None,
    ) -> Glm5ForCausalLM:
        """Load a local Hugging Face checkpoint; see glm5sdk.models.glm5.loading.from_pretrained for the arguments."""
        from glm5sdk.models.glm5.loading import from_pretrained

        return from_pretrained(
            cls, path, dtype, device, latent_norm_eps, progress, quantised, expert_slots, expert_group
        )

    def save_pretrained(self, path: str | PathLike[str], max_shard_bytes: int = 5 * 10**9) -> None:
        """Write config.json and safetensors in Hugging Face layout and names, atomically."""
        from glm5sdk.models.glm5.loading import save_pretrained

        save_pretrained(self, path, max_shard_bytes)

    def reset_parameters(self) -> None:
        """Draw every matrix from normal(0, initializer_range); norms keep 1, biases 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1 and not parameter.is_meta:
                    parameter.normal_(0.0, self.config.initializer_range)
                elif not parameter.is_meta:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def weight_kinds(self) -> frozenset[str]:
        """Kinds of its quantised weights (w8a8, w4a8, fp8); empty for a float model."""
        return weight_kinds(self)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: LatentCache | None = None
    ) -> Tensor:
        """Logits of every position.

        Args:
            input_ids: i64 [B, S].
            attention_mask: [B, S], 1 at real tokens; padding left or right.
            cache: from `make_cache`; the tokens continue it. Without one the pass is differentiable.

        Returns:
            f32 logits [B, S, V] (f64 in a float64 model); 0 at padding.

        Raises:
            ContractError: shapes, ids or mask do not fit. CapacityError: the cache is full. Nothing was written.
        """
        rows = flatten_padding(input_ids, attention_mask, self.config.vocab_size)
        hidden_TN = self._hidden(input_ids, rows, cache)
        return rows.spread(self.logits(hidden_TN))

    def logits(self, hidden_TN: Tensor) -> Tensor:
        """Hidden states after the final norm [T, N] -> f32 logits [T, V], never rounded to the activation dtype."""
        out = torch.float64 if hidden_TN.dtype == torch.float64 else torch.float32
        return self.lm_head(hidden_TN, out)

    def logprobs(self, input_ids: Tensor, targets: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Log-probability of each target under the model, with gradients; never materialises [T, V].

        Args:
            input_ids: i64 [B, S].
            targets: i64 [B, S]; the token that follows each position; -100 gives 0 and no gradient.
            attention_mask: as in `forward`.

        Returns:
            f32 [B, S], natural log; 0 at padding and ignored targets.
        """
        rows = flatten_padding(input_ids, attention_mask, self.config.vocab_size)
        if targets.shape != input_ids.shape:
            raise ContractError(f"logprobs: targets is {tuple(targets.shape)}, needs {tuple(input_ids.shape)}")
        loss_T, _ = ops.linear_cross_entropy(
            self._hidden(input_ids, rows, None), self.lm_head.weight, rows.pick(targets)
        )
        return rows.spread(loss_T.neg())

    def hidden_states(self, ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Flattened tokens [T] -> hidden states [T, N] after the final norm; the layer under every public call."""
        return self.model(ids_T, context)

    def mtp_hidden_states(self, next_ids_T: Tensor, hidden_TN: Tensor, context: ForwardContext) -> Tensor:
        """The MTP layer's hidden states, from which `logits` predicts the token after next.

        Args:
            next_ids_T: i64 [T], token i + 1 of each position i.
            hidden_TN: result of `hidden_states` (or of this function, to draft further).
            context: a fresh context over the same positions.

        Raises:
            ContractError: the model has no MTP layer.
        """
        mtp = self._mtp()
        embed = self.model.embed_tokens if mtp.embed_tokens is None else mtp.embed_tokens
        return mtp.draft(embed(next_ids_T), hidden_TN, context)

    def mtp_head(self) -> Tensor:
        """The matrix [V, N] behind the MTP layer's logits: lm_head, unless the checkpoint stored another."""
        head = self._mtp().shared_head.head
        return self.lm_head.weight if head is None else head.weight

    def _mtp(self) -> MtpLayer:
        if self.model.mtp is None:
            raise ContractError("model: num_nextn_predict_layers is 0, needs 1 for multi-token prediction")
        return self.model.mtp

    def make_cache(
        self,
        batch_size: int,
        max_seq_len: int,
        page_size: int = 64,
        kv_format: str = "plain",
        index_format: str = "plain",
    ) -> LatentCache:
        """An empty cache for `batch_size` requests of up to `max_seq_len` tokens.

        Args:
            batch_size: requests.
            max_seq_len: tokens each may reach.
            page_size: tokens a page.
            kv_format: "plain" (activation dtype) or "fp8_ds_mla".
            index_format: "plain" or "fp8".
        """
        sizes = self.cache_sizes()
        return LatentCache(batch_size, max_seq_len, page_size, *sizes, self.device, kv_format, index_format)

    def cache_sizes(self, with_mtp: bool = True) -> CacheSizes:
        """What the rows of a cache for this model are; without the MTP layer's if they are not wanted."""
        c = self.config
        layers = range(c.num_layers if with_mtp else c.num_hidden_layers)
        owns_index = tuple(c.has_indexer(layer) for layer in layers)
        return CacheSizes(c.kv_lora_rank, c.qk_rope_head_dim, c.index_head_dim, owns_index, self.dtype)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        **options: Any,
    ) -> Tensor:
        """Continue a batch of prompts; see glm5sdk.models.glm5.generation.generate for all options.

        Returns:
            i64 [B, S + new], prompt included; rows that ended early are filled with pad_token_id.
        """
        from glm5sdk.models.glm5.generation import generate

        return generate(self, input_ids, attention_mask, max_new_tokens, temperature, ignore_eos, **options)

    def context(
        self,
        batch: TokenBatch,
        cache: CachePools | None = None,
        collect_kl: bool = False,
        trace: Callable[[str, Any], None] | None = None,
    ) -> ForwardContext:
        """A forward context for these tokens with this model's rotary table and selection."""
        cos_sin = self._rope(max(batch.max_kv_len, 1), self.device)
        return ForwardContext(batch, cos_sin, cache, self.selection, collect_kl, trace=trace)

    def _hidden(self, input_ids: Tensor, rows: RaggedRows, cache: LatentCache | None) -> Tensor:
        ids_T = rows.pick(input_ids)
        if cache is None:
            return self.hidden_states(ids_T, self.context(TokenBatch.packed(rows.lengths, self.device)))
        self._check_cache(cache, len(rows.lengths))
        context = self.context(cache.batch(rows.lengths), cache)
        with torch.no_grad():
            hidden_TN = self.hidden_states(ids_T, context)
        cache.advance(rows.lengths)
        return hidden_TN

    def _check_cache(self, cache: LatentCache, batch: int) -> None:
        """Before the first layer: a later one would find its rows do not fit when earlier ones have been written."""
        if not isinstance(cache, LatentCache):
            raise ContractError(f"model: cache is {type(cache).__name__}, needs one from make_cache")
        for name, got, want in zip(CacheSizes._fields, cache.made_for, self.cache_sizes(), strict=True):
            if got != want:
                raise ContractError(
                    f"model: the cache's {name} is {got}, needs this model's {want}; "
                    "was it made by another model, or before the model changed its dtype?"
                )
        if cache.batch_size != batch:
            raise ContractError(f"model: batch is {batch}, needs the cache's batch_size {cache.batch_size}")

    def _pattern(self, layer: int, batch: TokenBatch, topk: int) -> Tensor:
        c = self.config
        return ops.window_stride_indices(batch.kv_lens, c.sparse_window, c.sparse_stride, topk)
