"""linear_cross_entropy and its log-sum-exp: against plain loops, torch, and float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops import _logsumexp
from glm5sdk.ops._weights import quantize_weight


def test_equals_loops() -> None:
    hidden, head = torch.randn(4, 6).double(), torch.randn(9, 6).double()
    targets = torch.tensor([3, -100, 0, 8])
    loss, lse = ops.linear_cross_entropy.reference(hidden, head, targets)
    for t in range(4):
        logits = [math.fsum(float(hidden[t, n]) * float(head[v, n]) for n in range(6)) for v in range(9)]
        want = math.log(math.fsum(math.exp(v) for v in logits))
        assert float(lse[t]) == pytest.approx(want, rel=1e-12)
        target = int(targets[t])
        assert float(loss[t]) == pytest.approx(0 if target < 0 else want - logits[target], rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("vocabulary", [1, 1023, 1024, 1025, 5000])
def test_equals_torch_over_block_edges(vocabulary: int) -> None:
    hidden, head = 3 * torch.randn(70, 8), torch.randn(vocabulary, 8)
    targets = torch.randint(0, vocabulary, (70,))
    loss, lse = ops.linear_cross_entropy.reference(hidden, head, targets)
    logits = hidden.double() @ head.double().T
    torch.testing.assert_close(lse.double(), logits.logsumexp(1), rtol=1e-6, atol=1e-5)
    want = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)


def test_log_sum_exp_merges_blocks_ascending() -> None:
    x = 5 * torch.randn(3, 2500)
    m, s = torch.full((3,), -torch.inf), torch.zeros(3)
    for start in (0, 1024, 2048):
        block = x[:, start : start + 1024]
        high = block.amax(1)
        both = torch.maximum(m, high)
        s = s * (m - both).exp() + (block - high[:, None]).exp().sum(1) * (high - both).exp()
        m = both
    torch.testing.assert_close(_logsumexp.log_sum_exp(x), m + s.log(), rtol=1e-7, atol=0)


def test_log_sum_exp_of_infinite_rows() -> None:
    x = torch.full((2, 1500), -torch.inf)
    x[1, 1300] = 2.0
    assert _logsumexp.log_sum_exp(x).tolist() == [-math.inf, 2.0]
    assert _logsumexp.log_sum_exp(torch.empty(2, 0)).tolist() == [-math.inf, -math.inf]
    # The huge values of one block must not flush those of another.
    far = torch.tensor([[1e30, -1e30]]).repeat(1, 1000)
    assert float(_logsumexp.log_sum_exp(far)) == pytest.approx(1e30)


def test_rows_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = torch.randn(50, 6).double(), torch.randn(40, 6).double(), torch.randint(0, 40, (50,))
    want = ops.linear_cross_entropy.reference(hidden, head, targets)
    monkeypatch.setattr(_logsumexp, "_CHUNK_ELEMENTS", 40 * 7)
    assert [s.stop - s.start for s in _logsumexp.row_chunks(50, 40)] == [7] * 7 + [1]
    for got, whole in zip(ops.linear_cross_entropy.reference(hidden, head, targets), want, strict=True):
        torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-12)
    check_backward(ops.linear_cross_entropy, hidden, head, torch.where(targets % 5 == 0, -100, targets))


def test_bf16_logits_stay_in_float32() -> None:
    hidden, head = torch.randn(20, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    loss, lse = ops.linear_cross_entropy.reference(hidden, head, torch.arange(20))
    assert loss.dtype == lse.dtype == torch.float32
    logits = hidden.double() @ head.double().T
    torch.testing.assert_close(lse.double(), logits.logsumexp(1), rtol=1e-5, atol=1e-5)


def test_ignored_rows_have_no_loss_and_no_gradient_from_it() -> None:
    hidden, head = leaf(3, 5), leaf(7, 5, seed=1)
    loss, lse = ops.linear_cross_entropy(hidden, head, torch.tensor([-100, 2, -100]))
    assert loss[0] == loss[2] == 0
    assert bool((lse != 0).all())
    loss.sum().backward()
    assert not hidden.grad[0].any()
    assert hidden.grad[1].any()


@pytest.mark.parametrize("target", [-1, -99, 7, 2**40])
def test_targets_outside_the_vocabulary(target: int) -> None:
    with pytest.raises(ContractError, match=rf"targets\[1\] is {target}, needs -100"):
        ops.linear_cross_entropy.reference(torch.ones(2, 3), torch.ones(7, 3), torch.tensor([0, target]))


def test_no_rows_and_quantised_heads() -> None:
    loss, lse = ops.linear_cross_entropy.reference(torch.ones(0, 3), torch.ones(7, 3), torch.ones(0).long())
    assert loss.shape == lse.shape == (0,)
    hidden, head = torch.randn(4, 130), torch.randn(50, 130) / 11
    plain = ops.linear_cross_entropy.reference(hidden, head, torch.arange(4))[0]
    for kind in ("w8a8", "fp8"):
        got = ops.linear_cross_entropy(hidden, quantize_weight(head, kind), torch.arange(4))[0]
        torch.testing.assert_close(got, plain, rtol=0.1, atol=0.1)


def test_backward_of_both_outputs_and_opcheck() -> None:
    hidden, head = torch.randn(9, 5).double(), torch.randn(1030, 5).double()
    targets = torch.tensor([0, 1029, -100, 1024, 1023, 5, 5, -100, 7])
    check_backward(ops.linear_cross_entropy, hidden, head, targets)
    opcheck(ops.linear_cross_entropy, leaf(9, 5), leaf(11, 5, seed=1), torch.arange(9))
