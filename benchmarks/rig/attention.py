"""Sparse attention and the indexer's selection over caches too large for the caches of a processor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5sdk.registry import Cost
from rig.case import Case, far, filled
from rig.machine import cold_bytes

PAGE, C, R = 64, 512, 64
HEADS, INDEX_HEADS, INDEX_DIM, TOPK = 64, 32, 128, 2048
SCALE = (192 + R) ** -0.5


def attention_decode(batch: int, speed: float | None = None, roof: float | None = None, context: int = 32768) -> Case:
    """One token a request; every request's selections are disjoint, so that a rotation meets each row once."""
    requests = -(-max(batch, -(-cold_bytes() // (context * (C + R) * 2))) // batch) * batch
    pool = filled(requests * context // PAGE, PAGE, C + R, scale=0.5)
    rows = pool.view(requests * context, C + R)
    generator = torch.Generator().manual_seed(1)
    inputs, torch_inputs = [], []
    for part in range(context // TOPK):
        for first in range(0, requests, batch):
            chosen = torch.stack([_part(context, part, first + b) for b in range(batch)])
            q = torch.randn(batch, HEADS, C + R, generator=generator).bfloat16()
            pages = torch.arange(batch * context // PAGE) + first * context // PAGE
            table = pages.view(batch, -1).int()
            ids = torch.arange(batch, dtype=torch.int32)
            inputs.append((q, pool, table, ids, chosen[:, None].int(), SCALE, C))
            offsets = (torch.arange(batch) + first)[:, None] * context
            torch_inputs.append((q, rows, (chosen + offsets).view(-1)))

    def check(result: tuple[Tensor, Tensor]) -> str:
        q, cache, slots = torch_inputs[0]
        keys = cache[slots].view(batch, TOPK, C + R).float()
        scores = torch.einsum("bhl,bkl->bhk", q.float(), keys) * SCALE
        out = torch.einsum("bhk,bkc->bhc", scores.softmax(-1), keys[..., :C])
        return far(result[0], out, 1e-2) or far(result[1], scores.logsumexp(-1), 1e-3)

    return Case(
        "sparse_flash_attention", f"decode B={batch}",
        Cost(2 * batch * HEADS * TOPK * (2 * C + R), 2 * batch * TOPK * (C + R), 2 * batch * HEADS * C),
        inputs, torch_inputs, {"matmul": _attend, "sdpa": _attend_sdpa}, check, speed, roof, compiled=("matmul",),
    )  # fmt: skip


def _part(context: int, part: int, request: int) -> Tensor:
    """The part-th of the disjoint selections of a request, ascending."""
    order = torch.randperm(context, generator=torch.Generator().manual_seed(request))
    return order[part * TOPK : (part + 1) * TOPK].sort().values


def _attend(q: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    keys = rows.index_select(0, slots).view(q.shape[0], -1, C + R)
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * SCALE
    return torch.bmm(scores.softmax(-1).to(q.dtype), keys[..., :C])


def _attend_sdpa(q: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Heads as queries of one head; values keep the rope part, which the fused kernel wants as wide as the keys."""
    keys = rows.index_select(0, slots).view(q.shape[0], 1, -1, C + R)
    return F.scaled_dot_product_attention(q[:, None], keys, keys, scale=SCALE)[:, 0, :, :C]


def indexer_decode(
    context: int, speed: float | None = None, roof: float | None = None, transformers: float | None = None
) -> Case:
    """One token that searches a long context."""
    requests = max(3, -(-cold_bytes() // (context * INDEX_DIM * 2)))
    return _indexer(1, context, requests, f"decode {context // 1024}k", speed, roof, {"transformers": transformers})


def indexer_prefill(queries: int, context: int, speed: float | None = None, roof: float | None = None) -> Case:
    """The last chunk of a prompt: every query sees the whole chunk before it."""
    return _indexer(queries, context, 2, f"prefill {queries} x {context // 1024}k", speed, roof, {})


def _indexer(
    queries: int,
    context: int,
    requests: int,
    preset: str,
    speed: float | None,
    roof: float | None,
    against: dict[str, float | None],
) -> Case:
    cache = filled(requests * context // PAGE, PAGE, INDEX_DIM)
    lengths = torch.arange(context - queries + 1, context + 1, dtype=torch.int32)
    inputs, torch_inputs = [], []
    for request in range(requests):
        iq = filled(queries, INDEX_HEADS, INDEX_DIM, seed=request + 1)
        iw = filled(queries, INDEX_HEADS, seed=request + 2, dtype=torch.float32, scale=0.05)
        table = (torch.arange(context // PAGE, dtype=torch.int32) + request * context // PAGE)[None]
        ids = torch.zeros(queries, dtype=torch.int32)
        inputs.append((iq, iw, cache, table, ids, lengths, TOPK, context))
        keys = cache.view(requests, context, INDEX_DIM)[request]
        torch_inputs.append((iq, iw, keys, lengths))
    visible = int(lengths.sum())

    def check(result: Tensor) -> str:
        iq, iw, keys, _ = torch_inputs[0]
        for row in {0, queries // 2, queries - 1}:
            length, got = int(lengths[row]), result[row, 0].long()
            scores = iw[row].double() @ (iq[row].double() @ keys[:length].double().T).relu()
            kth = scores.topk(TOPK).values[-1]
            tolerance = 1e-5 * float(scores.abs().max())
            if bool((got[1:] <= got[:-1]).any()) or int(got[0]) < 0 or int(got[-1]) >= length:
                return f"row {row} is not {TOPK} ascending positions"
            if float(scores[got].min()) < float(kth) - tolerance:
                return f"row {row} chose a key worth {float(scores[got].min()):.6f}, needs at least {float(kth):.6f}"
        return ""

    eager = {"bf16 scores": _select_bf16, "transformers": _select_transformers}
    return Case(
        "topk_indexer", preset,
        Cost(2 * visible * INDEX_HEADS * INDEX_DIM, 2 * context * INDEX_DIM, 4 * queries * TOPK),
        inputs, torch_inputs, eager, check, speed, roof, compiled=("bf16 scores",), against=against,
    )  # fmt: skip


def _select_bf16(iq: Tensor, iw: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """Products in bf16, the weighted sum in f32."""
    queries, context = iq.shape[0], keys.shape[0]
    scores = (iq.view(-1, INDEX_DIM) @ keys.T).view(queries, INDEX_HEADS, context)
    total = (scores.relu().float() * iw[..., None]).sum(1)
    if queries > 1:
        total = total.masked_fill(torch.arange(context) >= lengths[:, None], -torch.inf)
    return total.topk(TOPK, sorted=False).indices


def _select_transformers(iq: Tensor, iw: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """The arithmetic of GlmMoeDsaIndexer.forward, in the order in which it is written there."""
    scores = F.relu(torch.matmul(iq[None].float(), keys[None].transpose(-1, -2).float().unsqueeze(1)))
    total = torch.matmul(iw[None].unsqueeze(-2), scores).squeeze(-2)
    if iq.shape[0] > 1:
        total = total.masked_fill(torch.arange(keys.shape[0]) >= lengths[:, None], -torch.inf)
    return total.topk(TOPK, dim=-1).indices.int()
