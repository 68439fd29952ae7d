"""What the kinds of weights mean: how each is made, read back and multiplied with."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._quant import (
    BLOCK,
    FP8,
    fp8_scale,
    grouped,
    int4_scale,
    int8_scale,
    pack_int4,
    to_fp8,
    to_int4,
    to_int8,
    unpack_int4,
)  # fmt: skip
from glm5sdk.registry import Weight, WeightLike

__all__ = [
    "KINDS", "dequantize_weight", "experts", "gradient_target", "part_index", "project", "quantize_weight", "storage",
]  # fmt: skip

KINDS = ("plain", "w8a8", "w4a8", "fp8")


def quantize_weight(w: Tensor, kind: str) -> Weight:
    """Quantise a plain weight.

    Kinds and their tensors, for a weight [O, N] (a leading expert axis is kept on each):
        plain: (w,).
        w8a8: int8 [O, N]; f32 scale [O] per output channel.
        w4a8: u8 [O, ceil(N/2)], two int4 a byte, even element low; f32 scale [O, ceil(N/128)] per group along N.
        fp8: e4m3 [O, N]; f32 scale [ceil(O/128), ceil(N/128)], of row o at o // 128 whatever slice o was reached by.

    Args:
        w: [O, N] or [E, O, N], any float dtype.
        kind: one of the above.

    Returns:
        The weight in plain layout.

    Raises:
        ContractError: the kind or the rank is unknown.
    """
    if w.ndim not in (2, 3):
        raise ContractError(f"quantize_weight: w is {tuple(w.shape)}, needs [O, N] or [E, O, N]")
    shape, x = tuple(w.shape), w.detach().to(torch.float32)
    if kind == "plain":
        return Weight("plain", "plain", shape, (w,))
    if kind == "w8a8":
        scale = int8_scale(x.abs().amax(-1))
        return Weight("w8a8", "plain", shape, (to_int8(x, scale[..., None]), scale))
    if kind == "w4a8":
        groups = grouped(x)
        scale = int4_scale(groups.abs().amax(-1))
        q = to_int4(groups, scale[..., None]).flatten(-2)[..., : shape[-1]]
        return Weight("w4a8", "plain", shape, (pack_int4(q), scale))
    if kind == "fp8":
        columns = grouped(x).abs().amax(-1)  # [..., O, Nb]
        scale = fp8_scale(grouped(columns.mT).amax(-1).mT.contiguous())
        return Weight("fp8", "plain", shape, (to_fp8(x, _by_element(scale, shape)), scale))
    raise ContractError(f"quantize_weight: kind is {kind!r}, needs one of {', '.join(KINDS)}")


def storage(kind: str, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each tensor of a quantised weight in plain layout: values, then scales.

    Args:
        kind: w8a8, w4a8 or fp8; see `quantize_weight`.
        shape: of the weight, [O, N] or [E, O, N].

    Raises:
        ContractError: the kind is none of these.
    """
    *lead, rows, n = shape
    groups = -(-n // BLOCK)
    if kind == "w8a8":
        return (shape, torch.int8), ((*lead, rows), torch.float32)
    if kind == "w4a8":
        return ((*lead, rows, -(-n // 2)), torch.uint8), ((*lead, rows, groups), torch.float32)
    if kind == "fp8":
        return (shape, FP8), ((*lead, -(-rows // BLOCK), groups), torch.float32)
    raise ContractError(f"weight: kind is {kind!r}, needs one of {', '.join(KINDS[1:])}")


def part_index(kind: str, tensor: int, index: tuple[int | slice, ...]) -> tuple[int | slice, ...]:
    """Where part `index` of a fused weight [E, O, N] lies in its tensor number `tensor`.

    Args:
        kind: of the weight.
        tensor: 0 for the values, 1 for the scales.
        index: (e,) or (e, slice of rows).

    Raises:
        ContractError: fp8 rows that do not begin at a block's first row share its scale with other rows.
    """
    if kind != "fp8" or tensor == 0 or len(index) == 1:
        return index
    expert, rows = index
    assert isinstance(rows, slice), "a fused weight is cut by experts and rows"
    if rows.start % BLOCK:
        raise ContractError(
            f"weight: rows {rows.start} to {rows.stop} of a fused fp8 weight begin inside a block, need a multiple of "
            f"{BLOCK} as intermediate size of the experts"
        )
    return expert, slice(rows.start // BLOCK, -(-rows.stop // BLOCK))


def dequantize_weight(w: WeightLike, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers a weight stands for: value * scale, one rounding to `dtype`.

    Raises:
        ContractError: the weight is in a backend's own layout.
    """
    if isinstance(w, Tensor):
        return w.to(dtype)
    values, wide = plain_tensors(w), accumulator(dtype)
    if w.kind == "plain":
        return values[0].to(dtype)
    q, scale = values[0], values[1].to(wide)
    if w.kind == "w8a8":
        return (q.to(wide) * scale[..., None]).to(dtype)
    if w.kind == "w4a8":
        return (unpack_int4(q, w.shape[-1]).to(wide) * _along(scale, -1, w.shape[-1])).to(dtype)
    return (q.to(wide) * _by_element(scale, w.shape)).to(dtype)


def project(x: Tensor, w: WeightLike) -> Tensor:
    """x @ w^T, unrounded.

    w8a8, w4a8: activations int8 per token, integer products exact, times (sx * sw); w4a8 sums its groups ascending.
    fp8: activations e4m3 per token and 128 columns, each block's product times (sx * sw), blocks ascending.

    Args:
        x: [T, N] activations.
        w: [O, N].

    Returns:
        [T, O] in the accumulator dtype of x.
    """
    acc = accumulate(x)
    if isinstance(w, Tensor):
        return acc @ accumulate(w).T
    tensors = plain_tensors(w)
    if w.kind == "plain":
        return acc @ tensors[0].to(acc.dtype).T
    return {"w8a8": _w8a8, "w4a8": _w4a8, "fp8": _fp8}[w.kind](acc, w)


def experts(w: WeightLike) -> list[WeightLike]:
    """[E, O, N] as E weights [O, N]; unbound at once, because autograd of one select costs the whole tensor."""
    if isinstance(w, Tensor):
        return list(w.unbind(0))
    parts = zip(*(t.unbind(0) for t in plain_tensors(w)), strict=True)
    return [Weight(w.kind, w.layout, w.shape[1:], tuple(part)) for part in parts]


def gradient_target(w: WeightLike, dtype: torch.dtype) -> Tensor:
    """Zeros to accumulate a weight's gradient in; a quantised weight's stays zero, its input's is straight-through."""
    return torch.zeros(tuple(w.shape), dtype=dtype, device=w.device)


def plain_tensors(w: Weight) -> tuple[Tensor, ...]:
    """The tensors of a weight whose kind and layout are known here."""
    if w.layout != "plain" or w.kind not in KINDS:
        raise ContractError(
            f"weight: kind/layout is {w.tag!r}, needs a plain layout of {', '.join(KINDS)}. "
            "op.unprepare(w) brings a prepared weight back"
        )
    return w.tensors


def _along(scale: Tensor, dim: int, size: int) -> Tensor:
    """One scale per 128 elements -> one per element."""
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)


def _by_element(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    return _along(_along(scale, -2, shape[-2]), -1, shape[-1])


def _int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integer values (as float64, where sums of products are exact) and the scale of each row [T, 1]."""
    scale = int8_scale(x.abs().amax(-1, keepdim=True))
    return to_int8(x, scale).to(torch.float64), scale


def _w8a8(x: Tensor, w: Weight) -> Tensor:
    q, sx = _int8_rows(x)
    values, sw = w.tensors
    return (q @ values.to(torch.float64).T).to(x.dtype) * (sx * sw.to(x.dtype))


def _w4a8(x: Tensor, w: Weight) -> Tensor:
    q, sx = _int8_rows(x)
    values, sw = unpack_int4(w.tensors[0], w.shape[-1]).to(torch.float64), w.tensors[1].to(x.dtype)
    y = x.new_zeros(x.shape[0], w.shape[0])
    for group, start in enumerate(range(0, w.shape[-1], BLOCK)):
        columns = slice(start, start + BLOCK)
        y += (q[:, columns] @ values[:, columns].T).to(x.dtype) * (sx * sw[:, group])
    return y


def _fp8(x: Tensor, w: Weight) -> Tensor:
    groups = grouped(x)
    sx = fp8_scale(groups.abs().amax(-1))
    q = to_fp8(groups, sx[..., None]).to(x.dtype)
    values, sw = w.tensors[0].to(x.dtype), _along(w.tensors[1].to(x.dtype), -2, w.shape[0])
    y = x.new_zeros(x.shape[0], w.shape[0])
    for group, start in enumerate(range(0, w.shape[-1], BLOCK)):
        block = values[:, start : start + BLOCK]
        y += (q[:, group, : block.shape[1]] @ block.T) * (sx[:, group, None] * sw[:, group])
    return y
