"""Which ops have a CPU kernel and within which envelope: one row an op, one implementation an instruction level."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glm5sdk.registry.impl import Impl, Requires
from glm5sdk_cpu import _C

__all__ = ["implementations"]

FLOATS = ("f32", "bf16", "f16")
PLAIN = ("plain/plain",)
QUANTISED = ("w8a8/plain", "w4a8/plain", "fp8/plain")
PRIORITY = 100  # above composed and reference; a level adds its rank


@dataclass(frozen=True)
class Row:
    """One op's kernel.

    Attributes:
        op: the op, and the function of that name in the compiled module.
        dtypes: activation dtypes it takes.
        options: accepted values of string and switch arguments, where not all are.
        quantised: whether weights may be quantised; `_C.levels` has those kernels as `<op>_quantised`, and the module
            as overloads of the op's function, since a quantised weight comes as two tensors.
    """

    op: str
    dtypes: tuple[str, ...] = FLOATS
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    quantised: bool = False


ROWS = (
    Row("add"),
    Row("cache_index_keys"),
    Row("concat_and_cache_mla"),
    Row("dequantize", options={"out_dtype": (torch.float32, torch.bfloat16, torch.float16)}),
    Row("flash_mla"),
    Row("flash_mla_bwd", options={"format": ("plain",)}),
    Row("fused_add_rms_norm"),
    Row("fused_add_rms_norm_bwd"),
    Row("grouped_gemm", quantised=True),
    Row("hadamard"),
    Row("indexer_preprocess"),
    Row("indexer_project"),
    Row("layer_norm"),
    Row("linear", quantised=True),
    Row("linear_cross_entropy"),
    Row("linear_entropy"),
    Row("mla_expand_values"),
    Row("mla_preprocess"),
    Row("mla_project"),
    Row("moe_experts", quantised=True),
    Row("moe_gate"),
    Row("moe_permute"),
    Row("moe_unpermute"),
    Row("quantize_per_group"),
    Row("quantize_per_token"),
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
    _follow_torch()
    most = _C.cpu_level()
    return [_implementation(row, levels[n], n) for row in ROWS for n in _levels(row) if n <= most]


def _levels(row: Row) -> list[int]:
    """The levels at which some kernel of a row has a form of its own; the others run their best below."""
    return sorted({*_C.levels[row.op], *(_C.levels[f"{row.op}_quantised"] if row.quantised else ())})


def _follow_torch() -> None:
    """Use as many threads as torch does, whenever `torch.set_num_threads` changes that."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library))["_ZN2at15get_num_threadsEv"]  # int at::get_num_threads()
    except (OSError, AttributeError):
        return  # another build of torch: the limits of affinity, cgroup and environment hold alone
    _C.follow_num_threads(ctypes.cast(function, ctypes.c_void_p).value)


def _implementation(row: Row, level: str, rank: int) -> Impl:
    requires = Requires(
        device=("cpu",),
        dtypes=row.dtypes,
        options=row.options,
        weights=PLAIN + QUANTISED if row.quantised else PLAIN,
        plain_apart=True,
    )
    kernel = partial(getattr(_C, row.op), rank)
    return Impl(row.op, f"cpu.{level}", "native", kernel, requires, PRIORITY + rank, invariant=True)
