"""Which ops have a CPU kernel and within which envelope: one row an op, one implementation an instruction level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from glm5sdk.registry.impl import Impl, Requires
from glm5sdk_cpu import _C

__all__ = ["implementations"]

FLOATS = ("f32", "bf16", "f16")
PRIORITY = 100  # above composed and reference; a level adds its rank


@dataclass(frozen=True)
class Row:
    """One op's kernel.

    Attributes:
        op: the op, and the function of that name in the compiled module.
        dtypes: activation dtypes it takes.
        options: accepted values of string and switch arguments, where not all are.
    """

    op: str
    dtypes: tuple[str, ...] = FLOATS
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


ROWS = (
    Row("add"),
    Row("cache_index_keys"),
    Row("concat_and_cache_mla"),
    Row("flash_mla"),
    Row("flash_mla_bwd", options={"format": ("plain",)}),
    Row("fused_add_rms_norm"),
    Row("fused_add_rms_norm_bwd"),
    Row("grouped_gemm"),
    Row("indexer_preprocess"),
    Row("indexer_project"),
    Row("layer_norm"),
    Row("linear"),
    Row("linear_cross_entropy"),
    Row("linear_entropy"),
    Row("mla_expand_values"),
    Row("mla_preprocess"),
    Row("mla_project"),
    Row("moe_experts"),
    Row("moe_gate"),
    Row("moe_permute"),
    Row("moe_unpermute"),
    Row("rms_norm"),
    Row("rms_norm_bwd"),
    Row("rope"),
    Row("sample"),
    Row("silu_and_mul"),
    Row("silu_and_mul_bwd"),
    Row("sparse_flash_attention"),
    Row("sparse_flash_attention_bwd", options={"format": ("plain",)}),
    Row("topk_indexer"),
    Row("topk_indexer_with_scores"),
    Row("window_stride_indices"),
)


def implementations(levels: Sequence[str]) -> list[Impl]:
    """Every row at every level that this processor can run."""
    most = _C.cpu_level()
    return [_implementation(row, levels[n], n) for row in ROWS for n in _C.levels[row.op] if n <= most]


def _implementation(row: Row, level: str, rank: int) -> Impl:
    requires = Requires(device=("cpu",), dtypes=row.dtypes, options=row.options, weights=("plain/plain",))
    kernel = partial(getattr(_C, row.op), rank)
    return Impl(row.op, f"cpu.{level}", "native", kernel, requires, PRIORITY + rank, invariant=True)
