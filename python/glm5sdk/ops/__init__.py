"""The operator catalogue: one op, one file; everything above is built on these alone."""

from __future__ import annotations

from glm5sdk.ops.collective.all_to_all_combine import all_to_all_combine
from glm5sdk.ops.collective.all_to_all_dispatch import all_to_all_dispatch
from glm5sdk.ops.indexer.cache_index_keys import cache_index_keys
from glm5sdk.ops.indexer.indexer_kl import indexer_kl
from glm5sdk.ops.indexer.indexer_preprocess import indexer_preprocess
from glm5sdk.ops.indexer.indexer_project import indexer_project
from glm5sdk.ops.indexer.topk_indexer import topk_indexer
from glm5sdk.ops.indexer.topk_indexer_with_scores import topk_indexer_with_scores
from glm5sdk.ops.indexer.window_stride_indices import window_stride_indices
from glm5sdk.ops.linear import linear
from glm5sdk.ops.loss.linear_cross_entropy import linear_cross_entropy
from glm5sdk.ops.loss.linear_entropy import linear_entropy
from glm5sdk.ops.mla.concat_and_cache_mla import concat_and_cache_mla
from glm5sdk.ops.mla.flash_mla import flash_mla
from glm5sdk.ops.mla.mla_expand_values import mla_expand_values
from glm5sdk.ops.mla.mla_preprocess import mla_preprocess
from glm5sdk.ops.mla.mla_project import mla_project
from glm5sdk.ops.mla.sparse_flash_attention import sparse_flash_attention
from glm5sdk.ops.moe.grouped_gemm import grouped_gemm
from glm5sdk.ops.moe.moe_experts import moe_experts
from glm5sdk.ops.moe.moe_gate import moe_gate
from glm5sdk.ops.moe.moe_permute import moe_permute
from glm5sdk.ops.moe.moe_unpermute import moe_unpermute
from glm5sdk.ops.norm.add import add
from glm5sdk.ops.norm.fused_add_rms_norm import fused_add_rms_norm
from glm5sdk.ops.norm.layer_norm import layer_norm
from glm5sdk.ops.norm.rms_norm import rms_norm
from glm5sdk.ops.quant.dequantize import dequantize
from glm5sdk.ops.quant.hadamard import hadamard
from glm5sdk.ops.quant.quantize_per_group import quantize_per_group
from glm5sdk.ops.quant.quantize_per_token import quantize_per_token
from glm5sdk.ops.rope import rope
from glm5sdk.ops.sample import sample
from glm5sdk.ops.sampling_distribution import sampling_distribution
from glm5sdk.ops.silu_and_mul import silu_and_mul

__all__ = [
    "add",
    "all_to_all_combine",
    "all_to_all_dispatch",
    "cache_index_keys",
    "concat_and_cache_mla",
    "dequantize",
    "flash_mla",
    "fused_add_rms_norm",
    "grouped_gemm",
    "hadamard",
    "indexer_kl",
    "indexer_preprocess",
    "indexer_project",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_entropy",
    "mla_expand_values",
    "mla_preprocess",
    "mla_project",
    "moe_experts",
    "moe_gate",
    "moe_permute",
    "moe_unpermute",
    "quantize_per_group",
    "quantize_per_token",
    "rms_norm",
    "rope",
    "sample",
    "sampling_distribution",
    "silu_and_mul",
    "sparse_flash_attention",
    "topk_indexer",
    "topk_indexer_with_scores",
    "window_stride_indices",
]
