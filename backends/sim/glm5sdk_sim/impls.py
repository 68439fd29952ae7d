"""Which ops have a CUDA kernel and within which envelope: one row an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glm5sdk.registry.impl import AxisTest, Impl, Requires, at_most
from glm5sdk_sim import _C

__all__ = ["implementations"]

FLOATS = ("f32", "bf16")
SPLIT_KEYS = 512  # selected keys that a block of an attention kernel takes
PART_KEYS = 8192  # positions that a block of the selection takes
MOST_WORKSPACE = 2**28  # above, blocks walk instead of being apart


@dataclass(frozen=True)
class Row:
    """One op's kernel.

    Attributes:
        op: the op, and the function of that name in the compiled module.
        axes: the sizes it takes.
        workspace: bytes of scratch with which more blocks run at once, by axis sizes.
    """

    op: str
    axes: Mapping[str, AxisTest] = field(default_factory=dict)
    workspace: Callable[[Mapping[str, int]], int] | None = None


def attention_workspace(axes: Mapping[str, int]) -> int:
    """A largest score, a sum and C values for each split of each row and head."""
    splits = -(-axes["K"] // SPLIT_KEYS)
    size = 4 * axes["T"] * axes["H"] * splits * (axes["C"] + 2)
    return size if splits > 1 and size <= MOST_WORKSPACE else 0


def selection_workspace(axes: Mapping[str, int]) -> int:
    """K entries for each part of the longest row."""
    parts = -(-axes["M"] * axes["S"] // PART_KEYS)
    size = 8 * axes["T"] * parts * axes["K"]
    return size if parts > 1 and size <= MOST_WORKSPACE else 0


ATTENTION = {"C": at_most(512), "R": at_most(64)}
SELECTION = {"Hi": at_most(64), "Di": at_most(128), "K": at_most(2048)}
ROWS = (
    Row("rms_norm"),
    Row("sparse_flash_attention", ATTENTION, attention_workspace),
    Row("topk_indexer", SELECTION, selection_workspace),
    Row("topk_indexer_with_scores", SELECTION, selection_workspace),
)


def implementations() -> list[Impl]:
    """Every row, as the portable variant: what runs on sm_80 and later."""
    return [_implementation(row) for row in ROWS]


def _implementation(row: Row) -> Impl:
    requires = Requires(device=("cpu",), dtypes=FLOATS, axes=row.axes)
    kernel = getattr(_C, row.op)
    return Impl(row.op, "cuda_sim.portable", "native", kernel, requires, 1, invariant=True, workspace=row.workspace)
