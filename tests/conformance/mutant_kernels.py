"""Kernels with one fault each, written in torch as a native kernel would be, and the honest ones they are made from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5sdk.registry import CATALOGUE, Device, Impl, Layout, Requires
from glm5sdk.testing.rows import take

Kernel = Callable[..., None]


def honest(op_name: str) -> Kernel:
    """`fn(*inputs, *outputs)`: the reference on one row at a time, so that rows cannot know their batch."""
    op = CATALOGUE[op_name]
    count = len(op.signature.parameters) - len(op.dtype_arguments)
    names = [n for n in op.signature.parameters if n not in op.dtype_arguments]

    def kernel(*args: Any) -> None:
        inputs, outs = dict(zip(names, args[:count], strict=True)), args[count:]
        for name in op.dtype_arguments:
            inputs[name] = outs[0].dtype
        inputs = {name: inputs[name] for name in op.signature.parameters}
        if not outs:
            op.reference(*inputs.values())
            return
        for row in range(len(outs[0])):
            result = op.reference(*take(op, inputs, torch.tensor([row])).values())
            for out, value in zip(outs, result if isinstance(result, tuple) else (result,), strict=True):
                out[row] = value[0]

    return kernel


def _room(t: Tensor, elements: int) -> bool:
    """Whether a tensor's storage goes on behind it; plain outputs end with their storage, guarded ones do not."""
    return t.untyped_storage().nbytes() >= (t.storage_offset() + t.numel() + elements) * t.element_size()


def _behind(t: Tensor) -> Tensor:
    return t.as_strided((1,), (1,), t.storage_offset() + t.numel())


def _before(t: Tensor) -> Tensor:
    return t.as_strided((1,), (1,), t.storage_offset() - 1)


# rms_norm(x, weight, eps, y)


def tail_dropped(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    y[:, x.shape[1] // 4 * 4 :] = 0


def past_the_end(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    if _room(y, 1):
        _behind(y).fill_(1)


def before_the_start(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    if y.storage_offset():
        _before(y).fill_(1)


def reads_past_the_end(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    if _room(weight, 1) and y.numel():
        y[0] += 0 * _behind(weight)


def last_row_unwritten(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    if len(x) > 1:
        honest("rms_norm")(x[:-1], weight, eps, y[:-1])
    else:
        honest("rms_norm")(x, weight, eps, y)


def adds_to_garbage(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    y.mul_(0)
    result = torch.empty_like(y)
    honest("rms_norm")(x, weight, eps, result)
    y.add_(result)


def nondeterministic(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    y.mul_(1 + torch.finfo(y.dtype).eps * torch.randint(0, 2, y.shape).to(y.dtype))


def writes_its_input(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    x.add_(1)


def eps_forgotten(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, 0.0, y)
    y += eps


def refuses_half(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    from glm5sdk.core.errors import ContractError

    if x.dtype == torch.float16:
        raise ContractError("rms_norm: dtype is float16, needs float32 or bfloat16")
    honest("rms_norm")(x, weight, eps, y)


def slow(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    start = time.process_time()
    while time.process_time() - start < 0.2:
        pass


def scratch_overrun(x: Tensor, weight: Tensor, eps: float, y: Tensor, scratch: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    if _room(scratch, 1):
        _behind(scratch).fill_(0)


def scratch_unwritten(x: Tensor, weight: Tensor, eps: float, y: Tensor, scratch: Tensor) -> None:
    honest("rms_norm")(x, weight, eps, y)
    y += (0 * scratch.view(torch.float32).sum()).to(y.dtype)


def norm_of_the_unrounded_sum(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, y: Tensor, residual_out: Tensor
) -> None:
    """Keeps the sum in float32 for the norm: closer to float64, and no longer what the two ops give."""
    total = x.float() + residual.float()
    residual_out.copy_(total)
    wide = torch.empty_like(total)
    honest("rms_norm")(total, weight.float(), eps, wide)
    y.copy_(wide)


# linear(x, w, bias, y)


def linear_tail_dropped(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    width = max(x.shape[1] // 8 * 8, 1)
    honest("linear")(x[:, :width], w[:, :width], bias, y)


def sum_depends_on_batch(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Splits the reduction in two when there are enough rows to make that pay."""
    honest("linear")(x, w, bias, y)
    half = x.shape[1] // 2
    if len(x) >= 4 and half:
        first, second = x[:, :half].float() @ w[:, :half].float().T, x[:, half:].float() @ w[:, half:].float().T
        total = first + second
        y.copy_(total if bias is None else total + bias.float())


_pool = [2]


def threads(count: int | None = None) -> int:
    """The size of a thread pool that is not there."""
    if count is not None:
        _pool[0] = count
    return _pool[0]


def sum_depends_on_threads(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    honest("linear")(x, w, bias, y)
    if threads() == 3:
        y.mul_(1 + torch.finfo(y.dtype).eps)


TRANSPOSED = Layout("mutant.transposed", "plain", lambda w: (w.tensors[0].T.contiguous(),), lambda w: (w.tensors[0],))


def _linear_transposed(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    honest("linear")(x, w if w.shape == (y.shape[1], x.shape[1]) else w.T, bias, y)


# attention, selection, routing, caches


def off_by_one_key(q: Tensor, cache: Tensor, *rest: Any) -> None:
    rolled = cache.flatten(0, 1).roll(1, 0).view_as(cache)
    honest("sparse_flash_attention")(q, rolled, *rest)


def absent_is_key_zero(q: Tensor, cache: Tensor, table: Tensor, requests: Tensor, indices: Tensor, *rest: Any) -> None:
    """Reads key 0 where a selection says -1, in rows that select something else."""
    filled = indices.clone()
    some = (indices >= 0).any(-1) & (indices < 0).any(-1) & ~(indices == 0).any(-1)
    filled[some] = torch.cat([torch.zeros_like(indices[some][:, :1]), indices[some][:, :-1]], -1)
    honest("sparse_flash_attention")(q, cache, table, requests, filled, *rest)


def lse_in_base_two(*args: Any) -> None:
    honest("sparse_flash_attention")(*args)
    args[-1].mul_(1.4426950408889634)


def padding_not_cleared(q: Tensor, cache: Tensor, table: Tensor, requests: Tensor, *rest: Any) -> None:
    out, lse = rest[-2:]
    kept = out[requests < 0].clone(), lse[requests < 0].clone()
    honest("sparse_flash_attention")(q, cache, table, requests, *rest)
    out[requests < 0], lse[requests < 0] = kept


def ties_go_to_the_later(*args: Any) -> None:
    """Of equal scores the later position wins: right on random floats, wrong in the total order."""
    iq, iw, cache, table, requests, lens, topk = args[:7]
    indices = args[-1]
    honest("topk_indexer")(*args)
    if args[8] != "plain":
        return
    flat = cache.flatten(0, 1).float()
    for row in range(len(indices)):
        if requests[row] < 0 or lens[row] <= topk:
            continue
        positions = torch.arange(int(lens[row]))
        page = table[requests[row]].long()[positions // cache.shape[1]]
        keys = flat[page * cache.shape[1] + positions % cache.shape[1]]
        scores = (iw[row].float()[:, None] * (iq[row].float() @ keys.T).relu()).sum(0)
        order = (scores.flip(0)).sort(descending=True, stable=True).indices
        indices[row, 0] = (len(positions) - 1 - order[:topk]).sort().values.int()


def chooses_without_bias(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> None:
    honest("moe_gate")(x, w, None, *rest)


def negative_slots_wrap(rows: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
    """-1 taken for an index: the last place of the pool is overwritten."""
    honest("concat_and_cache_mla")(rows, cache, slots, *rest)
    if bool((slots < 0).any()) and cache.numel():
        cache[-1, -1] = 1


def neighbours_overwritten(rows: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
    """A store one row too long, as with a vector wider than what is left."""
    flat = cache.flatten(0, 1)
    for slot in slots[slots >= 0].tolist():
        if slot + 1 < len(flat):
            flat[slot + 1, :1] = 1
    honest("concat_and_cache_mla")(rows, cache, slots, *rest)


def forgets_weight_gradient(grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, dx: Tensor, dw: Tensor) -> None:
    backward = CATALOGUE["rms_norm_bwd"].reference
    dx.copy_(backward(grad_y, x, weight, eps)[0])
    dw.zero_()


@dataclass(frozen=True)
class Mutant:
    """A fault and the checks that may be the first to see it.

    Attributes:
        op: the op.
        kernel: the faulty kernel.
        checks: names of checks.
        row: more of its Impl.
    """

    op: str
    kernel: Kernel
    checks: tuple[str, ...]
    row: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_")


def _mutant(op: str, kernel: Kernel, *checks: str, **row: Any) -> Mutant:
    return Mutant(op, kernel, checks, row)


ATTENTION = "sparse_flash_attention"
MUTANTS = [
    _mutant("rms_norm", tail_dropped, "right"),
    _mutant("rms_norm", past_the_end, "guards"),
    _mutant("rms_norm", before_the_start, "guards"),
    _mutant("rms_norm", reads_past_the_end, "unwritten"),
    # Fresh memory is often the right answer of the call before: the plain run may see nothing.
    _mutant("rms_norm", last_row_unwritten, "right", "unwritten"),
    _mutant("rms_norm", adds_to_garbage, "right", "unwritten"),
    _mutant("rms_norm", nondeterministic, "deterministic"),
    _mutant("rms_norm", writes_its_input, "inputs"),
    _mutant("rms_norm", eps_forgotten, "right"),
    _mutant("rms_norm", refuses_half, "runs", requires=Requires(dtypes=("f32", "bf16", "f16"))),
    _mutant("rms_norm", slow, "quick"),
    _mutant("rms_norm", scratch_overrun, "guards", workspace=lambda axes: 64),
    _mutant("rms_norm", scratch_unwritten, "right", "unwritten", workspace=lambda axes: 64),
    _mutant("fused_add_rms_norm", norm_of_the_unrounded_sum, "fused"),
    _mutant("rms_norm_bwd", forgets_weight_gradient, "right", invariant=False),
    _mutant("linear", linear_tail_dropped, "right"),
    _mutant("linear", sum_depends_on_batch, "rows"),
    _mutant("linear", sum_depends_on_threads, "threads"),
    _mutant("linear", _linear_transposed, "prepared", layout=TRANSPOSED),
    _mutant(ATTENTION, off_by_one_key, "right"),
    _mutant(ATTENTION, absent_is_key_zero, "right"),
    _mutant(ATTENTION, lse_in_base_two, "right"),
    _mutant(ATTENTION, padding_not_cleared, "right", "property", "unwritten"),
    _mutant("topk_indexer", ties_go_to_the_later, "exact", "right"),
    _mutant("moe_gate", chooses_without_bias, "right"),
    _mutant("concat_and_cache_mla", negative_slots_wrap, "slots"),
    _mutant("concat_and_cache_mla", neighbours_overwritten, "slots", "exact", "right"),
]
HONEST = ["rms_norm", "linear", ATTENTION, "topk_indexer", "moe_gate", "concat_and_cache_mla"]


class MutantBackend:
    """Every faulty kernel and the honest ones, never chosen unasked."""

    name = "mutant"
    api_version = 1
    levels = ()
    automatic = False
    threads = staticmethod(threads)

    def probe(self) -> Device:
        return Device("cpu", "kernels that fail on purpose")

    def impls(self) -> list[Impl]:
        faulty = [Impl(m.op, f"mutant.{m.name}", "native", m.kernel, **{"invariant": True, **m.row}) for m in MUTANTS]
        # A fused kernel is compared with its parts in the same variant.
        parts = [Impl(op, "mutant.norm_of_the_unrounded_sum", "native", honest(op)) for op in ("add", "rms_norm")]
        return faulty + parts + [Impl(op, "mutant.honest", "native", honest(op), invariant=True) for op in HONEST]
