"""Decoder layer, MTP layer and the stack of layers, built from a config."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.layers import Embedding, Linear, RMSNorm
from glm5sdk.nn.mla import LatentAttention, LatentAttentionSizes
from glm5sdk.nn.moe import MLP, MixtureOfExperts, MixtureSizes

__all__ = ["DecoderLayer", "Glm5Model", "MtpLayer"]


def attention_sizes(config: Glm5Config) -> LatentAttentionSizes:
    return LatentAttentionSizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_latent=config.q_lora_rank,
        latent=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        nope=config.qk_nope_head_dim,
        value=config.v_head_dim,
        scale=config.softmax_scale,
        eps=config.latent_norm_eps,
        interleaved=config.rope_interleave,
        topk=config.num_selected_keys,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_interleaved=config.indexer_rope_interleave,
    )


def mixture_sizes(config: Glm5Config) -> MixtureSizes:
    return MixtureSizes(
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        active=config.num_experts_per_tok,
        shared=config.shared_intermediate_size,
        groups=config.n_group,
        active_groups=config.topk_group,
        score=config.scoring_func,
        has_bias=config.has_router_bias,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        temperature=config.router_temperature,
        limit=config.swiglu_limit,
    )


class DecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream, which travels beside the newest contribution to it."""

    def __init__(self, config: Glm5Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(attention_sizes(config), layer, config.has_indexer(layer))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            MixtureOfExperts(mixture_sizes(config), layer)
            if config.is_moe(layer)
            else MLP(config.hidden_size, config.intermediate_size, config.swiglu_limit)
        )

    def forward(self, x_TN: Tensor, residual_TN: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """(what the layer adds last, residual stream without it)."""
        h_TN, residual_TN = self.input_layernorm.add(x_TN, residual_TN)
        h_TN = self.self_attn(h_TN, context)
        h_TN, residual_TN = self.post_attention_layernorm.add(h_TN, residual_TN)
        return self.mlp(h_TN, context), residual_TN


class SharedHead(nn.Module):
    """The norm before the MTP layer's logits; its head is lm_head unless a checkpoint stored a different one."""

    head: Linear | None

    def __init__(self, config: Glm5Config) -> None:
        super().__init__()
        self.head = None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """Predicts the token after next from a hidden state and the embedding of the next token.

    Its embedding is the model's, unless a checkpoint stored a different one.
    """

    embed_tokens: Embedding | None

    def __init__(self, config: Glm5Config) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.embed_tokens = None
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def draft(self, embedding_TN: Tensor, hidden_TN: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, N] after the head's norm, from which logits follow and the next draft step starts.

        Args:
            embedding_TN: embedding of token i + 1 for each position i.
            hidden_TN: the main model's hidden state of position i, after its final norm (or this function's own
                result, when drafting further).
            context: positions i.
        """
        # As the published runtimes do, the embedding at position 0 counts as zero.
        embedding_TN = embedding_TN.masked_fill((context.batch.positions == 0)[:, None], 0)
        joined = torch.cat([self.enorm(embedding_TN), self.hnorm(hidden_TN)], dim=-1)
        x_TN, residual_TN = self(self.eh_proj(joined), None, context)
        return self.shared_head.norm.add(x_TN, residual_TN)[0]


class Glm5Model(nn.Module):
    """Embedding, decoder layers (the MTP layer, if any, last) and final norm."""

    def __init__(self, config: Glm5Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        layers: list[DecoderLayer] = [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        if config.num_nextn_predict_layers:
            layers.append(MtpLayer(config))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.depth = config.num_hidden_layers

    def forward(self, ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, N] after the final norm."""
        x_TN, residual_TN = self.embed_tokens(ids_T), None
        for layer in self.layers[: self.depth]:
            x_TN, residual_TN = layer(x_TN, residual_TN, context)
        return self.norm.add(x_TN, residual_TN)[0]

    @property
    def mtp(self) -> MtpLayer | None:
        """The MTP layer, None when the model has none."""
        return self.layers[self.depth] if len(self.layers) > self.depth else None  # type: ignore[return-value]
