"""Formulas that the attention references share: projections, norms, rope and softmax over a group's keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from glm5sdk.ops._cache import KeyGroup, read_kv_rows
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._weights import dequantize_weight
from glm5sdk.registry import WeightLike

__all__ = [
    "attend",
    "attention_backward",
    "gradient_sum",
    "index_scores",
    "layer_scaled",
    "per_head",
    "place_rows",
    "rotate",
    "scaled_rms",
    "scaled_rms_backward",
]


def per_head(x: Tensor, w: WeightLike) -> Tensor:
    """x [T, H, C] times w [H, D, C] head by head: [T, H, D], in the accumulator, not rounded."""
    acc = accumulate(x)
    return (acc.transpose(0, 1) @ dequantize_weight(w, acc.dtype).transpose(1, 2)).transpose(0, 1)


def scaled_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., N]; rounded after the scaling and after the weight."""
    acc = accumulate(x)
    r = (acc.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (acc * r).to(x.dtype) * weight


def scaled_rms_backward(grad_y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x (in the accumulator, not rounded) and of weight of `scaled_rms`.

    With n = x * r and g = grad_y * weight: dx = r * (g - n * mean(g * n)), dweight = sum of grad_y * a(n).
    """
    acc, grad = accumulate(x), accumulate(grad_y)
    r = (acc.square().mean(-1, keepdim=True) + eps).rsqrt()
    n = acc * r
    dweight = (grad * n.to(x.dtype)).flatten(0, -2).sum(0)
    g = grad * weight
    return (g - n * (g * n).mean(-1, keepdim=True)).mul_(r), dweight.to(weight.dtype)


def layer_scaled(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of x [..., N] with the biased variance; one rounding, at the end."""
    acc = accumulate(x)
    centred = acc - acc.mean(-1, keepdim=True)
    r = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centred * r * accumulate(weight) + accumulate(bias)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rope of x [T, H, R] at positions [T]; cos_sin [Pmax, R] holds R/2 cosines, then R/2 sines. One rounding."""
    acc = accumulate(x)
    half = x.shape[-1] // 2
    table = cos_sin.index_select(0, positions)[:, None].to(acc.dtype)
    cos, sin = table[..., :half], table[..., half:]
    if interleaved:
        a, b = acc[..., 0::2], acc[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
    a, b = acc[..., :half], acc[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, keys: Tensor, visible: Tensor, scale: float, v_dim: int) -> tuple[Tensor, Tensor]:
    """Softmax attention of one group; rows that see nothing get 0 and -inf, with gradients 0.

    Args:
        q: [t, H, C + R] in the accumulator dtype.
        keys: [n, C + R]; the first C columns are the values too.
        visible: [t, 1 or H, n] bool.
        scale: on the scores.
        v_dim: C.

    Returns:
        out [t, H, C] and the natural log-sum-exp [t, H], not rounded.
    """
    scores = (q @ keys.T * scale).masked_fill(~visible, -torch.inf)
    empty = ~visible.any(-1)
    top = scores.detach().amax(-1, keepdim=True).masked_fill(empty[..., None], 0.0)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    total = torch.where(empty[..., None], 1.0, total)
    lse = (top + total.log())[..., 0].masked_fill(empty, -torch.inf)
    return weighted_values(p, keys[:, :v_dim], visible) / total, lse


def weighted_values(p: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """p [t, H, n] times values [n, C]; a value that is not finite is felt only by rows that see it: 0 * NaN is NaN."""
    odd = ~values.isfinite().all(-1)
    if not bool(odd.any()):
        return p @ values
    total = p @ values.masked_fill(odd[:, None], 0.0)
    for key in odd.nonzero()[:, 0].tolist():
        total = total + torch.where(visible[..., key, None], p[..., key, None] * values[key], 0.0)
    return total


def attention_backward(
    groups: Iterable[KeyGroup],
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    scale: float,
    v_dim: int,
    format: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the cache (zero unless `plain`) for both attention ops, in the accumulator, rounded once.

    With p the softmax and d = grad_out . value: d score = p * (d - grad_out . out + grad_lse). Groups and their chunks
    add up in order, so the sum over rows that share a key is deterministic.
    """
    acc = accumulator(q.dtype)
    dq = torch.zeros_like(q, dtype=acc)
    dcache = q.new_zeros(*kv_cache.shape[:2], q.shape[-1], dtype=acc)  # by its rule, whatever bytes a row has
    flat = dcache.flatten(0, 1)
    for group in groups:
        keys = read_kv_rows(kv_cache, group.slots, v_dim, format, acc)
        dkeys = torch.zeros_like(keys)
        for rows, visible, n in group.chunks():
            given = (grad_out.index_select(0, rows).to(acc), grad_lse.index_select(0, rows).to(acc))
            part = _attend_backward(
                *given, accumulate(q.index_select(0, rows)), keys[:n], visible[..., :n], scale, v_dim
            )
            dq.index_copy_(0, rows, part[0])
            dkeys[:n] += part[1]
        if kv_cache.is_floating_point():
            flat.index_add_(0, group.slots, dkeys)
    return dq.to(q.dtype), dcache.to(q.dtype)


def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, keys: Tensor, visible: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of `attend`, everything in the accumulator: of q [t, H, L] and of keys [n, L]."""
    hidden = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
    p = (q @ keys.T).mul_(scale).add_(hidden).softmax(-1)
    empty = ~visible.any(-1, keepdim=True)
    if bool(empty.any()):
        p = p.masked_fill(empty, 0.0)
    values = keys[:, :v_dim]
    shift = (grad_out * (p @ values)).sum(-1) - grad_lse
    d = (grad_out @ values.T).sub_(shift[..., None]).mul_(p)
    dkeys = d.flatten(0, 1).T @ q.flatten(0, 1) * scale
    dkeys[:, :v_dim] += p.flatten(0, 1).T @ grad_out.flatten(0, 1)
    return (d @ keys).mul_(scale), dkeys


def index_scores(iq: Tensor, iw: Tensor, keys: Tensor) -> Tensor:
    """Scores of the lightning indexer: sum over heads, ascending from +0, of iw * relu(iq . k).

    Args:
        iq: [t, Hi, Di] in the accumulator dtype.
        iw: [t, Hi].
        keys: [n, Di].

    Returns:
        [t, n], not rounded, not masked.
    """
    # One product per row, so that a row's bits do not depend on how many rows stand beside it.
    terms = torch.bmm(iq, keys.T.expand(len(iq), -1, -1)).relu() * iw[..., None]
    scores = torch.zeros_like(terms[:, 0]) if iq.shape[1] else terms.new_zeros(len(iq), len(keys))
    for head in range(iq.shape[1]):
        scores = scores + terms[:, head]
    return scores


def place_rows(parts: list[tuple[KeyGroup, Tensor]], like: Tensor, fill: float) -> Tensor:
    """Rows computed group by group, back in call order; rows of no group are `fill`.

    Args:
        parts: groups and their rows [t, ...].
        like: an uninitialised or zero tensor [T, ...] with the result's shape and dtype.
        fill: value of the other rows.
    """
    result = torch.full_like(like, fill)
    if not parts:
        return result
    rows = torch.cat([group.rows for group, _ in parts])
    return result.index_copy(0, rows, torch.cat([part.to(like.dtype) for _, part in parts]))


def gradient_sum(cache: Tensor) -> Tensor:
    """The cache as references should read it: pages that requests share add up their gradients in the accumulator."""
    return cache.to(accumulator(cache.dtype)) if cache.requires_grad else cache
