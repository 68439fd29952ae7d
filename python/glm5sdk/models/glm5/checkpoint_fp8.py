"""FP8 weights as GLM-5 and DeepSeek-V3.2 publish them: e4m3 with one float32 scale per block of 128 by 128."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from glm5sdk.core.errors import CheckpointError

BLOCK = 128
SIDECAR = "_scale_inv"  # appended to the weight's name; despite its own name it multiplies
_E4M3_MAX = 448.0
_LEAST_AMAX = 1e-4

# Matrices that every published build leaves unquantised.
_KEPT = ("embed_tokens.weight", "head.weight", "gate.weight", "weights_proj.weight", "eh_proj.weight")


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a matrix [out, in]: blocks at its edges may be partial (576 rows have 5)."""
    out, inner = shape
    return (-(-out // BLOCK), -(-inner // BLOCK))


def dequantise_blocks(q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """q * scale of its block, computed in float32 and rounded once.

    Args:
        q: float8_e4m3fn [out, in].
        scale_inv: f32 [ceil(out / 128), ceil(in / 128)].
        dtype: of the result [out, in].

    Raises:
        CheckpointError: the scales' shape does not fit.
    """
    if tuple(scale_inv.shape) != scale_shape(tuple(q.shape)):
        raise CheckpointError(
            f"dequantise_blocks: scale_inv is {list(scale_inv.shape)}, needs {list(scale_shape(tuple(q.shape)))} "
            f"for a weight of {list(q.shape)}"
        )
    result = torch.empty(q.shape, dtype=dtype)
    # One row of blocks at a time: the float32 intermediate stays small.
    for block, row in enumerate(range(0, q.shape[0], BLOCK)):
        rows = slice(row, row + BLOCK)
        scales = scale_inv[block].repeat_interleave(BLOCK)[: q.shape[1]]
        result[rows] = q[rows].to(torch.float32) * scales
    return result


def quantise_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest e4m3 values of w / scale, with scale = max(amax of the block, 1e-4) / 448.

    Args:
        w: float [out, in].

    Returns:
        (q float8_e4m3fn [out, in], scale_inv f32 [ceil(out / 128), ceil(in / 128)]).
    """
    rows, columns = scale_shape(tuple(w.shape))
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32)
    padded[: w.shape[0], : w.shape[1]] = w
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale_inv = blocks.abs().amax(dim=(1, 3)).clamp_min(_LEAST_AMAX) / _E4M3_MAX
    # A quotient may land a rounding above the largest value, which the cast would turn into NaN.
    q = (blocks / scale_inv[:, None, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX).view_as(padded)
    return q[: w.shape[0], : w.shape[1]].to(torch.float8_e4m3fn), scale_inv


def is_published_as_fp8(name: str, shape: tuple[int, ...]) -> bool:
    """Whether published FP8 builds quantise this tensor: all matrices but embeddings, heads, routers, eh_proj and the
    indexer's weights_proj. What to save, never how to read: a reader goes by the presence of scales.
    """
    return len(shape) == 2 and not name.endswith(_KEPT)


def quantised_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A stream of named checkpoint tensors with the matrices that published FP8 builds quantise turned to FP8.

    Each is followed by its scales; the others pass unchanged (see `is_published_as_fp8`).
    """
    for name, tensor in tensors:
        if not is_published_as_fp8(name, tuple(tensor.shape)):
            yield name, tensor
            continue
        q, scale_inv = quantise_blocks(tensor)
        yield name, q
        yield name + SIDECAR, scale_inv
