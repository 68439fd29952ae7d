"""Linear layers, the projections before attention, and the routed experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm5sdk.ops._weights import dequantize_weight, quantize_weight
from glm5sdk.registry import Cost, Weight, get_op
from rig.case import Case, far, filled
from rig.machine import cold_bytes

EPS = 1e-5


def linear(
    tokens: int, speed: float | None = None, roof: float | None = None, inputs: int = 6144, outputs: int = 8192
) -> Case:
    """One product; the weights alone are larger than most caches."""
    copies = max(2, -(-cold_bytes() // (2 * inputs * outputs)))
    weights = [filled(outputs, inputs, seed=n, scale=inputs**-0.5) for n in range(copies)]
    x = filled(tokens, inputs, seed=99)
    cost = Cost(2 * tokens * inputs * outputs, 2 * (tokens * inputs + inputs * outputs), 2 * tokens * outputs)
    return Case(
        "linear", f"{tokens} x {inputs} x {outputs}", cost, [(x, w) for w in weights], [(x, w) for w in weights],
        {"F.linear": F.linear}, lambda y: far(y, x.float() @ weights[0].float().T, 5e-3), speed, roof,
        compiled=("F.linear",),
    )  # fmt: skip


def mla_preprocess(tokens: int, speed: float | None = None, roof: float | None = None) -> Case:
    """GLM-5's sizes: both down projections, norms, up projection, absorption, rope, cache write."""
    n, h, c, r, q, dn, pages = 6144, 64, 512, 64, 2048, 192, 64
    shapes = {"w_q_a": (q, n), "w_q_b": (h * (dn + r), q), "w_kv_a": (c + r, n), "w_uk": (h, c, dn)}
    each = sum(2 * a[0] * a[1] * (a[2] if len(a) > 2 else 1) for a in shapes.values())
    hidden, norm_q, norm_kv = filled(tokens, n), torch.ones(q).bfloat16(), torch.ones(c).bfloat16()
    positions = torch.arange(tokens) + 100
    angles = torch.outer(torch.arange(4096).float(), 1e6 ** -(torch.arange(0, r, 2) / r))
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    cache, slots = torch.zeros(pages, 64, c + r, dtype=torch.bfloat16), torch.arange(tokens) + 64
    inputs = []
    for copy in range(max(2, -(-cold_bytes() // each))):
        w = {k: filled(*s, seed=copy + i, scale=s[-1] ** -0.5) for i, (k, s) in enumerate(shapes.items())}
        inputs.append((hidden, w["w_q_a"], norm_q, w["w_q_b"], w["w_kv_a"], norm_kv, w["w_uk"], positions, cos_sin,
                       cache, slots, EPS))  # fmt: skip

    def check(result: tuple[Tensor, Tensor]) -> str:
        op = get_op("mla_project")
        wide = [a.float() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in inputs[0]]
        want_q, want_kv, want_latent = op.reference(*wide[:9], EPS, True)
        rows = cache.view(-1, c + r)[slots]
        return far(result[0], want_q, 2e-2) or far(result[1], want_latent, 1e-2) or far(rows, want_kv, 1e-2)

    axes = {"T": tokens, "N": n, "H": h, "C": c, "R": r, "Q": q, "Dn": dn, "Pmax": 4096}
    cost = get_op("mla_preprocess").cost
    assert cost is not None
    return Case(
        "mla_preprocess", f"T={tokens}", cost(axes, 2), inputs, inputs, {"composition": _preprocess}, check, speed,
        roof, compiled=("composition",),
    )  # fmt: skip


def _preprocess(
    hidden: Tensor, w_q_a: Tensor, norm_q: Tensor, w_q_b: Tensor, w_kv_a: Tensor, norm_kv: Tensor, w_uk: Tensor,
    positions: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, latent, nope = w_uk.shape
    q_latent = F.rms_norm(F.linear(hidden, w_q_a), norm_q.shape, norm_q, eps)
    q = F.linear(q_latent, w_q_b).view(len(hidden), heads, -1)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), w_uk.transpose(1, 2)).transpose(0, 1)
    kv = F.linear(hidden, w_kv_a)
    cos, sin = cos_sin[positions].chunk(2, -1)
    row = torch.cat([F.rms_norm(kv[:, :latent], norm_kv.shape, norm_kv, eps), _rope(kv[:, latent:], cos, sin)], -1)
    cache.view(-1, row.shape[1]).index_copy_(0, slots, row)
    return torch.cat([absorbed, _rope(q[..., nope:], cos[:, None], sin[:, None])], -1), q_latent


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


class Experts:
    """64 experts of 2048 x 1024, eight for each token; made once, 805 MB in bf16."""

    active, hidden, width = 8, 2048, 1024

    def __init__(self, count: int = 64) -> None:
        self.count = count
        self.gate_up = filled(self.count, 2 * self.width, self.hidden, seed=1, scale=self.hidden**-0.5)
        self.down = filled(self.count, self.hidden, self.width, seed=2, scale=self.width**-0.5)

    def case(self, tokens: int, kind: str, speed: float | None = None, roof: float | None = None) -> Case:
        """`kind`: bf16, or w8a8 with int8 weights and activations."""
        weights: tuple[Any, Any] = (self.gate_up, self.down)
        if kind == "w8a8":
            weights = (quantize_weight(self.gate_up, kind), quantize_weight(self.down, kind))
        sets = [self._routes(tokens, seed) for seed in range(8)]
        inputs = [(x, ids, share, *weights) for x, ids, share in sets]
        eager = {"loop": partial(_experts_loop, expert=_expert), "grouped_mm": _experts_grouped}
        if tokens == 1:
            eager["loop of mv"] = partial(_experts_loop, expert=_expert_row)
        torch_inputs = [(x, ids, share, self.gate_up, self.down) for x, ids, share in sets]
        if kind == "w8a8":
            bf16 = dict(eager)
            eager = {f"bf16 {name}": _take_bf16(f, self.gate_up, self.down) for name, f in bf16.items()}
            eager["int8 loop"] = _experts_int8
            torch_inputs = inputs
        offsets = torch.full((self.count + 1,), tokens, dtype=torch.int32)
        offsets[0] = 0
        touched = len(sets[0][1].unique())
        one = 3 * self.width * self.hidden * (1 if kind == "w8a8" else 2)
        moved = 2 * tokens * self.hidden
        cost = Cost(tokens * self.active * 6 * self.hidden * self.width, touched * one + moved, moved)

        def check(result: Tensor) -> str:
            x, ids, share = sets[0]
            rows = range(0, tokens, max(1, tokens // 4))
            want = torch.stack([self._slowly(x[t], ids[t], share[t], weights) for t in rows])
            return far(result[list(rows)], want, 1e-2)

        return Case(
            "moe_experts", f"T={tokens} {kind}", cost, inputs, torch_inputs, eager, check, speed, roof,
            kind="int8" if kind == "w8a8" else "bf16", products=("grouped_gemm", (sets[0][0], weights[0], offsets)),
        )  # fmt: skip

    def _routes(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(tokens, self.count, generator=generator)
        ids = scores.topk(self.active).indices.sort().values.int()
        if tokens == 1:  # the rotation's tokens share no expert: each call reads weights that no recent one has read
            ids = (
                torch.arange(self.active)[None] * self.count // self.active + seed % (self.count // self.active)
            ).int()
        share = torch.rand(tokens, self.active, generator=generator).softmax(-1)
        return filled(tokens, self.hidden, seed=seed), ids, share

    def _slowly(self, x: Tensor, ids: Tensor, share: Tensor, weights: tuple[Any, Any]) -> Tensor:
        total = torch.zeros(self.hidden)
        seen = _as_int8 if isinstance(weights[0], Weight) else torch.Tensor.float
        for e, weight in zip(ids.tolist(), share.tolist(), strict=True):
            gate_up, down = (_wide(w, e) for w in weights)
            # Rounded where the op rounds: a step of int8 is coarse enough for a value beside a tie to tell.
            gate, up = (gate_up @ seen(x)).to(x.dtype).chunk(2)
            total += weight * (down @ seen(F.silu(gate) * up))
        return total


def _as_int8(row: Tensor) -> Tensor:
    """What an int8 activation stands for."""
    scale = row.float().abs().max().clamp_min(1e-8) / 127
    return (row.float() / scale).round() * scale


def _wide(w: Any, expert: int) -> Tensor:
    if isinstance(w, Weight):
        return dequantize_weight(Weight(w.kind, w.layout, w.shape[1:], tuple(t[expert] for t in w.tensors)))
    return w[expert].float()


def _take_bf16(f: Any, gate_up: Tensor, down: Tensor) -> Any:
    return lambda x, ids, share, *_: f(x, ids, share, gate_up, down)


def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def _expert_row(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = torch.mv(gate_up, x[0]).chunk(2)
    return torch.mv(down, F.silu(gate) * up)[None]


def _experts_loop(x: Tensor, ids: Tensor, share: Tensor, gate_up: Tensor, down: Tensor, expert: Any) -> Tensor:
    """Expert by expert, as transformers' eager path."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        row = expert(x[token], gate_up[e], down[e])
        out.index_add_(0, token, row.float() * share[token, slot, None])
    return out.to(x.dtype)


def _experts_grouped(x: Tensor, ids: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sorted rows and two grouped products, as transformers' grouped path."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    token = order // ids.shape[1]
    ends = torch.bincount(flat, minlength=len(gate_up)).cumsum(0).int()
    gate, up = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.zeros(x.shape, dtype=torch.float32)
    return out.index_add_(0, token, rows.float() * share.flatten()[order, None]).to(x.dtype)


def _experts_int8(x: Tensor, ids: Tensor, share: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """The loop with torch's integer product: rows to int8, int32 sums, both scales."""

    def product(rows: Tensor, w: Weight, e: int) -> Tensor:
        scale = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        q = (rows.float() / scale).round().to(torch.int8)
        return (torch._int_mm(q, w.tensors[0][e].T).float() * scale * w.tensors[1][e]).to(x.dtype)

    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = product(x[token], gate_up, e).chunk(2, -1)
        row = product(F.silu(gate) * up, down, e)
        out.index_add_(0, token, row.float() * share[token, slot, None])
    return out.to(x.dtype)
