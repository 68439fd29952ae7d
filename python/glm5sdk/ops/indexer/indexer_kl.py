"""The indexer's training loss: its scores against what the main attention looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import key_groups, read_index_rows, read_kv_rows, selected_slots
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._mla import attend, gradient_sum
from glm5sdk.ops._test_inputs import SCALE, choose, draw, page_inputs, selections
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    rows, heads, row = axes["T"], axes["H"], axes["C"] + axes["R"]
    index = axes["Hi"] * axes["Di"]
    # Without a selection every row may see all its request's pages.
    keys = axes["K"] or axes["M"] * axes["S"]
    read = size * (rows * (heads * row + index) + min(axes["B"], rows) * axes["M"] * axes["S"] * (row + axes["Di"]))
    return Cost(2 * rows * keys * (heads * row + index), read + 4 * rows * (heads + axes["Hi"]), 4 * rows)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """A consistent call: lse is what attention over the same keys returns."""
    acc = accumulator(dtype)
    paged = page_inputs(axes, generator)
    q = draw((axes["T"], axes["H"], axes["C"] + axes["R"]), dtype, generator, exact)
    cache = draw((axes["P"], axes["S"], axes["C"] + axes["R"]), dtype, generator, exact)
    indices = None
    if axes["K"] or choose(2, generator):
        indices = selections(paged["request_ids"], paged["kv_lens"], 1, axes["K"], generator)
    lse = torch.full((axes["T"], axes["H"]), -torch.inf, dtype=acc)
    lengths = {"kv_lens": paged["kv_lens"], "indices": indices}
    for group in key_groups("indexer_kl", paged["block_table"], paged["request_ids"], axes["P"], axes["S"], **lengths):
        keys = read_kv_rows(cache, group.slots, axes["C"], "plain", acc)
        lse[group.rows] = attend(accumulate(q[group.rows]), keys, group.visible, SCALE, axes["C"])[1]
    return {**paged, "q": q, "kv_cache": cache, "lse": lse, "indices": indices, "scale": SCALE}


@dataclass(frozen=True)
class Part:
    """Some rows and the keys they are compared over: all of a request's, or for each row those selected for it.

    Attributes:
        rows: [t] places of the rows in the call.
        slots: [n], where the keys lie, or [t, n].
        visible: [t, n], which keys count.
    """

    rows: Tensor
    slots: Tensor
    visible: Tensor

    def index_keys(self, cache: Tensor, dim: int, format: str, acc: torch.dtype) -> Tensor:
        """[n, Di] or [t, n, Di]."""
        return read_index_rows(cache, self.slots.flatten(), dim, format, acc).unflatten(0, self.slots.shape)

    def target(self, q: Tensor, cache: Tensor, lse: Tensor, scale: float, v_dim: int, format: str) -> Tensor:
        """Attention summed over heads, over the visible keys, each row summing to 1: [t, n].

        Head by head: [t, H, n] at once would be the largest tensor of the step.
        """
        acc = accumulator(q.dtype)
        keys = read_kv_rows(cache, self.slots.flatten(), v_dim, format, acc).unflatten(0, self.slots.shape)
        queries, sums = q.index_select(0, self.rows).to(acc), lse.index_select(0, self.rows).to(acc)
        total = keys.new_zeros(self.visible.shape)
        for head in range(q.shape[1]):
            scores = (queries[:, head : head + 1] @ keys.mT)[:, 0] if keys.ndim == 3 else queries[:, head] @ keys.T
            total += (scores * scale - sums[:, head, None]).masked_fill(~self.visible, -torch.inf).exp()
        mass = total.sum(-1, keepdim=True)
        return total / torch.where(mass > 0, mass, 1.0)  # no keys, or none that attention can see here: 0


def parts(
    name: str,
    block_table: Tensor,
    request_ids: Tensor,
    shape: torch.Size,
    kv_lens: Tensor,
    indices: Tensor | None,
    width: int,
) -> Iterator[Part]:
    """The call in pieces of at most 64 rows; `shape` of a cache, `width` of what is computed per row and key."""
    if indices is None:
        for group in key_groups(name, block_table, request_ids, shape[0], shape[1], kv_lens=kv_lens, width=width):
            for rows, visible, n in group.chunks():
                if n:
                    yield Part(rows, group.slots[:n], visible[:, 0])
        return
    slots, present = selected_slots(name, block_table, request_ids, shape[0], shape[1], kv_lens, indices)
    if bool(present.any()):
        every = torch.arange(len(slots), device=slots.device)
        for rows in every.split(64):
            yield Part(rows, slots[rows, 0], present[rows, 0])


def backward(
    grad_loss: Tensor,
    iq: Tensor,
    iw: Tensor,
    index_cache: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    lse: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    kv_lens: Tensor,
    indices: Tensor | None,
    scale: float,
    v_dim: int,
    format: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """d score = grad_loss * (prediction * sum target - target); a head passes it on, times iw, where it is positive."""
    acc, dim = accumulator(iq.dtype), iq.shape[2]
    diq, diw = torch.zeros_like(iq, dtype=acc), torch.zeros_like(iw, dtype=acc)
    dcache = torch.zeros_like(index_cache, dtype=acc)
    name, width = "indexer_kl_bwd", iq.shape[1] + 4
    for part in parts(name, block_table, request_ids, index_cache.shape, kv_lens, indices, width):
        rows, hidden = part.rows, ~part.visible
        iq_rows, iw_rows = iq.index_select(0, rows).to(acc), iw.index_select(0, rows).to(acc)
        keys = part.index_keys(index_cache, dim, format, acc)
        heads = (iq_rows @ keys.mT).relu_()
        scores = (iw_rows[:, None] @ heads)[:, 0].masked_fill_(hidden, -torch.inf)
        prediction = scores.softmax(-1).masked_fill_(hidden, 0.0)
        target = part.target(q, kv_cache, lse, scale, v_dim, format)
        d = (prediction * target.sum(-1, keepdim=True) - target) * grad_loss.index_select(0, rows).to(acc)[:, None]
        diw.index_copy_(0, rows, (heads @ d[..., None])[..., 0])
        d_heads = heads.sign_().mul_(iw_rows[..., None]).mul_(d[:, None])
        diq.index_copy_(0, rows, d_heads @ keys)
        shared = keys.ndim == 2
        dkeys = d_heads.flatten(0, 1).T @ iq_rows.flatten(0, 1) if shared else (d_heads.mT @ iq_rows).flatten(0, 1)
        dcache.view(-1, dim).index_add_(0, part.slots.flatten(), dkeys)
    return diq.to(iq.dtype), diw.to(iw.dtype), dcache.to(index_cache.dtype)


@op(
    inputs={
        "iq": "a[T, Hi, Di]",
        "iw": "f32[T, Hi]",
        "index_cache": "index_cache[P, S, Di]",
        "q": "a[T, H, C+R]",
        "kv_cache": "kv_cache[P, S, C, R]",
        "lse": "f32[T, H]",
        "block_table": "i32[B, M]",
        "request_ids": "i32[T]",
        "kv_lens": "i32[T]",
        "indices": "i32[T, 1, K]?",
        "v_dim": "= C",
    },
    outputs={"loss": "f32[T]"},
    rows="T",
    grad=("iq", "iw", "index_cache"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"P": (1, 5), "K": (0, 9)},
        geometries=(
            {"T": 2, "H": 64, "C": 512, "R": 64, "Hi": 32, "Di": 128, "B": 2, "M": 2, "P": 5, "S": 64, "K": 65},
            {"T": 5, "H": 3, "C": 20, "R": 12, "Hi": 3, "Di": 20, "B": 2, "M": 9, "P": 20, "S": 7, "K": 0},
            {"T": 5, "H": 2, "C": 5, "R": 2, "Hi": 1, "Di": 5, "B": 3, "M": 64, "P": 200, "S": 1, "K": 63},
            {"T": 0, "H": 2, "C": 4, "R": 2, "Hi": 2, "Di": 4, "B": 1, "M": 1, "P": 1, "S": 2, "K": 2},
        ),
    ),
)
def indexer_kl(
    iq: Tensor,
    iw: Tensor,
    index_cache: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    lse: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    kv_lens: Tensor,
    indices: Tensor | None,
    scale: float,
    v_dim: int,
    format: str = "plain",
) -> Tensor:
    """KL divergence of the indexer's distribution from the main attention's, per token; it trains the indexer alone.

    target[s] = sum over heads of exp(scale * q[h] . k[s] - lse[h]), divided by its sum; prediction = softmax of the
    index scores (see `topk_indexer`) over the same keys; loss = sum target * (ln target - ln prediction).

    Args:
        iq: [T, Hi, Di] index queries.
        iw: [T, Hi] f32 head weights.
        index_cache: [P, S, Di] index keys.
        q: [T, H, C + R] absorbed queries of the main attention.
        kv_cache: [P, S, C + R].
        lse: [T, H] f32, as attention over these keys returned it.
        block_table: [B, M] i32, physical page of each logical page.
        request_ids: [T] i32; -1 = padding row.
        kv_lens: [T] i32, how many keys the row may see.
        indices: [T, 1, K] i32, keys to compare over (sparse training); None compares over all `kv_lens` keys (warm-up).
        scale: of the main attention's scores.
        v_dim: C.
        format: `plain`: training reads no quantised cache.

    Returns:
        loss [T] f32 in nats, >= 0; 0 for rows that see no key, or none with any attention. Gradients: iq, iw and
        index_cache, nothing else.

    Raises:
        ContractError: shapes or dtypes do not fit; a request, length, selection or page is out of range.

    Source: DeepSeek-V3.2-Exp's indexer training, dense warm-up and sparse stage.
    """
    acc, dim = accumulator(iq.dtype), iq.shape[2]
    cache = gradient_sum(index_cache)
    losses = []
    width = iq.shape[1] + 4
    for part in parts("indexer_kl", block_table, request_ids, index_cache.shape, kv_lens, indices, width):
        rows, visible = part.rows, part.visible
        with torch.no_grad():
            target = part.target(q, kv_cache, lse, scale, v_dim, format)
        heads = (iq.index_select(0, rows).to(acc) @ part.index_keys(cache, dim, format, acc).mT).relu_()
        scores = (iw.index_select(0, rows).to(acc)[:, None] @ heads)[:, 0]
        # Invisible keys get no weight but a finite score, so that rows which see nothing have gradient 0, not NaN.
        lowest = scores.detach().amin(-1, keepdim=True)
        top = torch.where(visible, scores.detach(), lowest).amax(-1, keepdim=True)
        weight = (scores - top).masked_fill(~visible, -torch.inf).exp().sum(-1, keepdim=True)
        log_weight = weight.masked_fill(~visible.any(-1, keepdim=True), 1.0).log()
        log_prediction = (scores - top - log_weight).masked_fill(~visible, 0.0)
        losses.append((rows, (torch.xlogy(target, target) - target * log_prediction).sum(-1)))
    result = iq.new_zeros(len(iq), dtype=acc)
    if not losses:
        return result
    return result.index_copy(0, torch.cat([r for r, _ in losses]), torch.cat([x for _, x in losses]))
