"""One matrix to integers: round to nearest, scales by search, or with the error of each column fed forward."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.ops._quant import BLOCK, int4_scale, int8_scale, pack_int4, to_int4, to_int8
from glm5sdk.ops._weights import quantize_weight
from glm5sdk.registry.weight import Weight

__all__ = ["METHODS", "gram", "quantise_matrix"]

METHODS = ("rtn", "search", "gptq")
_DAMPING = 0.01  # of the mean diagonal; keeps inputs that calibration hardly saw from exploding
_CLIPS = {"w8a8": [1 - 0.02 * i for i in range(11)], "w4a8": [1 - 0.025 * i for i in range(21)]}


def gram(x: Tensor) -> Tensor:
    """x^T x in float64, [N, N] from activations [T, N]: what decides the output error of a change of weights."""
    x = x.to(torch.float64)
    return x.T @ x


def quantise_matrix(w: Tensor, kind: str, method: str, inputs: Tensor | None) -> Weight:
    """The quantised weight of that kind whose output on calibration inputs is near w's.

    rtn: nearest values with the scales of ops/_weights.py. search: besides, each channel (w8a8) or group (w4a8) takes
    the clipping of its largest value that makes the output error least. gptq: besides, columns are rounded one after
    the other, and what a column lost is made good by those still to come (Frantar and others 2022, GPTQ).
    FP8 is always rtn: its formula is the published one.

    Args:
        w: [O, N], any float dtype.
        kind: w8a8, w4a8 or fp8.
        method: one of METHODS.
        inputs: Gram matrix [N, N] float64 of calibration inputs (see `gram`); None or zero means rtn.
    """
    if kind == "fp8" or method == "rtn" or inputs is None or not bool(inputs.any()):
        return quantize_weight(w, kind)
    x = w.detach().to(torch.float64)
    columns = [slice(0, x.shape[1])] if kind == "w8a8" else _groups(x.shape[1])
    if method == "search":
        scales = [_best_scale(x[:, c], inputs[c, c], kind) for c in columns]
        values = [_round(x[:, c], s, kind) for c, s in zip(columns, scales, strict=True)]
        q, scale = torch.cat(values, 1), torch.stack(scales, 1)
    else:
        q, scale = _gptq(x, inputs, kind)
    shape = tuple(w.shape)
    if kind == "w8a8":
        return Weight(kind, "plain", shape, (q.contiguous(), scale[:, 0].contiguous()))
    return Weight(kind, "plain", shape, (pack_int4(q), scale.contiguous()))


def _groups(n: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]


def _round(x: Tensor, scale: Tensor, kind: str) -> Tensor:
    """int8 values of x [O, n] with scales [O]."""
    return (to_int8 if kind == "w8a8" else to_int4)(x, scale[:, None].to(x.dtype))


def _best_scale(x: Tensor, inputs: Tensor, kind: str) -> Tensor:
    """f32 [O]: of the clippings, the one with the least output error d inputs d^T of each row; ties to the mildest."""
    of = int8_scale if kind == "w8a8" else int4_scale
    amax = x.abs().amax(1)
    best, least = of(amax.float()), torch.full_like(amax, torch.inf)
    for clip in _CLIPS[kind]:
        scale = of((amax * clip).float())
        d = _round(x, scale, kind) * scale[:, None].to(x.dtype) - x
        error = ((d @ inputs) * d).sum(1)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _gptq(x: Tensor, inputs: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Values int8 [O, N] and scales f32 [O, groups]; float64 inside, blocks of 128 columns at a time."""
    n = x.shape[1]
    damped = inputs.clone()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean()
    # Row i of the upper factor says how the columns after i make good an error in column i.
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    x, q = x.clone(), torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = [_best_scale(x, inputs, kind)] if kind == "w8a8" else []
    for block in _groups(n):
        if kind != "w8a8":
            scales.append(_best_scale(x[:, block], inputs[block, block], kind))
        scale = scales[-1]
        wide, part = scale.to(x.dtype), x[:, block]
        upper, lost = factor[block, block], torch.empty_like(part)
        for i in range(part.shape[1]):
            q[:, block.start + i] = _round(part[:, i : i + 1], scale, kind)[:, 0]
            lost[:, i] = (part[:, i] - q[:, block.start + i] * wide) / upper[i, i]
            part[:, i + 1 :] -= lost[:, i : i + 1] * upper[i, i + 1 :]
        x[:, block.stop :] -= lost @ factor[block, block.stop :]
    return q, torch.stack(scales, 1)
