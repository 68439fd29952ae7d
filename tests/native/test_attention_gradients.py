"""Gradients of the attention kernels: float64 autograd of the formula, and the same bits for any number of threads."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import FLOATS, UNIT, bits_equal, draw
from paged_cases import paged, selections

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C

SCALE = 0.3
LENGTHS = torch.tensor([1, 70, 64, 0, 150, 33, 9], dtype=torch.int32)
REQUESTS = torch.tensor([0, 1, -1, 0, 1, 1, 0], dtype=torch.int32)
# heads, latent, rope: odd, whole tiles, wide
SHAPES = [(3, 20, 12), (5, 64, 64), (8, 130, 6)]


class Case:
    """Two requests of 150 tokens in pages of 7; one padding row, one row without keys."""

    def __init__(self, heads, latent, rope, dtype):
        rows = draw(2, 150, latent + rope, seed=1, dtype=dtype)
        self.paged = paged(rows, 7, "plain", latent)
        self.cache = self.paged.cache.nan_to_num(nan=3.0)  # pages of nobody; the reference multiplies them by zero
        self.q = draw(len(LENGTHS), heads, latent + rope, seed=2, dtype=dtype)
        self.grads = (
            draw(len(LENGTHS), heads, latent, seed=3, dtype=dtype),
            draw(len(LENGTHS), heads, seed=4),
        )
        self.latent = latent

    def run(self, module, level, what):
        """Gradients of the sparse op for `what` = indices, of the dense one for lengths."""
        kernel = module.sparse_flash_attention_bwd if what.ndim == 3 else module.flash_mla_bwd
        outs = torch.full_like(self.q, torch.nan), torch.full_like(self.cache, torch.nan)
        kernel(
            level, *self.grads, self.q, self.cache, self.paged.table, REQUESTS, what, SCALE, self.latent, "plain", *outs
        )
        return outs

    def exact(self, what):
        """The formula row by row in float64, and the sums of absolute values that bound its rounding errors."""
        q, cache = self.q.double().requires_grad_(), self.cache.double().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for t, (request, length) in enumerate(zip(REQUESTS.tolist(), LENGTHS.tolist(), strict=True)):
            for h in range(q.shape[1]):
                chosen = what[t, h % what.shape[1]].long() if what.ndim == 3 else torch.arange(length)
                chosen = chosen[chosen >= 0]
                if request < 0 or len(chosen) == 0:
                    continue
                keys = cache.flatten(0, 1)[self.paged.slots[request, chosen]]
                scores = keys @ q[t, h] * SCALE
                total = total + (scores.softmax(0) @ keys[:, : self.latent]) @ self.grads[0][t, h].double()
                total = total + scores.logsumexp(0) * self.grads[1][t, h].double()
        return torch.autograd.grad(total, (q, cache))


def selected(groups, k=40):
    return selections(LENGTHS, groups, k, seed=5)


def close(got, want, dtype):
    """Within f32 noise of the tensor's size, plus one rounding of each element."""
    error = (got.double() - want).abs()
    assert (error <= 2 * UNIT[dtype] * want.abs() + 2e-5 * want.abs().max()).all(), f"off by {error.max()}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["shared", "per_head", "dense"])
def test_gradients_are_those_of_float64(level, dtype, shape, kind):
    case = Case(*shape, dtype)
    what = LENGTHS if kind == "dense" else selected(1 if kind == "shared" else shape[0])
    for got, want in zip(case.run(_C, level, what), case.exact(what), strict=True):
        close(got, want, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("groups", [1, 5])
def test_thread_count_never_changes_a_bit(native, level, dtype, groups):
    case = Case(5, 70, 6, dtype)
    found = []
    for threads in (1, 2, 3, 7):
        native.set_num_threads(threads)
        found.append((*case.run(native, level, selected(groups)), *case.run(native, level, LENGTHS)))
    for other in found[1:]:
        assert all(bits_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_many_chunks_of_rows_are_one(native, level):
    """More rows than are kept at a time; how many those are depends on the threads."""
    t, k = 700, 64
    case = Case(4, 16, 4, torch.bfloat16)
    lengths = torch.arange(t, dtype=torch.int32) % 150 + 1
    requests = torch.arange(t, dtype=torch.int32) % 2
    q, out = draw(t, 4, 20, seed=6, dtype=torch.bfloat16), draw(t, 4, 16, seed=7, dtype=torch.bfloat16)
    arguments = (out, draw(t, 4, seed=8), q, case.cache, case.paged.table, requests, selections(lengths, 4, k, 9))
    found = []
    for threads in (1, 400):
        native.set_num_threads(threads)
        outs = torch.full_like(q, torch.nan), torch.full_like(case.cache, torch.nan)
        native.sparse_flash_attention_bwd(level, *arguments, SCALE, 16, "plain", *outs)
        found.append(outs)
    assert all(bits_equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("groups", [1, 5])
def test_all_positions_give_the_dense_gradients(level, groups):
    case = Case(5, 40, 8, torch.bfloat16)
    everything = torch.arange(150).expand(len(LENGTHS), groups, 150)
    everything = torch.where(everything < LENGTHS[:, None, None], everything, -1).int().contiguous()
    sparse, dense = case.run(_C, level, everything), case.run(_C, level, LENGTHS)
    assert bits_equal(sparse[0], dense[0])
    if groups == 1:
        assert bits_equal(sparse[1], dense[1])


def test_a_training_step_runs_the_kernel_its_forward_chose():
    case = Case(3, 20, 12, torch.float32)
    q, cache = case.q.clone().requires_grad_(), case.cache.clone().requires_grad_()
    indices = selected(1)
    outs = ops.sparse_flash_attention(q, cache, case.paged.table, REQUESTS, indices, SCALE, case.latent)
    torch.autograd.backward(outs, case.grads)
    most = _C.levels["sparse_flash_attention_bwd"]
    want = case.run(_C, max(n for n in most if n <= _C.cpu_level()), indices)
    assert bits_equal(q.grad, want[0])
    assert bits_equal(cache.grad, want[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.tensor([[[1, 1]]], dtype=torch.int32)}, "ascending"),
        ({"requests": torch.tensor([2], dtype=torch.int32)}, "request_ids"),
        ({"format": "fp8_ds_mla"}, "format is fp8_ds_mla, needs plain"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(level, change, message):
    case = Case(3, 20, 12, torch.float32)
    values = {"requests": torch.zeros(1, dtype=torch.int32), "indices": torch.zeros(1, 1, 2, dtype=torch.int32)}
    values["indices"][..., 1] = -1
    values = {**values, "format": "plain", **change}
    outs = torch.full((1, 3, 32), 7.0), torch.full_like(case.cache, 7.0)
    with pytest.raises(ContractError, match=f"sparse_flash_attention_bwd: .*{message}"):
        _C.sparse_flash_attention_bwd(
            level, *(g[:1] for g in case.grads), case.q[:1], case.cache, case.paged.table, values["requests"],
            values["indices"], SCALE, 20, values["format"], *outs,
        )  # fmt: skip
    assert all((x == 7).all() for x in outs)
