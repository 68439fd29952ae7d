"""Losses over a vocabulary in blocks: against float64, against the logits of `linear`, against their batch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FLOATS, bits_equal, draw

from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C

BLOCK = 1024


def cross_entropy(level, hidden, head, targets):
    loss, lse = (torch.full((hidden.shape[0],), math.nan) for _ in range(2))
    _C.linear_cross_entropy(level, hidden, head, targets, loss, lse)
    return loss, lse


def entropy(level, hidden, head):
    out = torch.full((hidden.shape[0],), math.nan)
    _C.linear_entropy(level, hidden, head, out)
    return out


def logits_of(level, hidden, head):
    y = torch.empty(hidden.shape[0], head.shape[0])
    _C.linear(level, hidden, head, None, y)
    return y


def targets_of(t, v):
    return torch.randint(0, v, (t,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "t,n,v", [(1, 1, 1), (3, 20, 1023), (2, 12, 1024), (65, 33, 1025), (5, 130, 4100), (140, 8, 37)]
)
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_losses_agree_with_float64(level, dtype, t, n, v, size):
    hidden, head = draw(t, n, dtype=dtype, seed=1, scale=size * n**-0.5), draw(v, n, dtype=dtype, seed=2)
    targets = targets_of(t, v)
    targets[::4] = -100
    logits = hidden.double() @ head.double().t()
    lse = logits.logsumexp(1)
    loss, got = cross_entropy(level, hidden, head, targets)
    error = 2e-6 * (1 + logits.abs().amax(1))
    assert ((got - lse).abs() <= error).all()
    want = torch.where(targets < 0, 0, lse - logits.gather(1, targets.clamp(min=0)[:, None])[:, 0])
    assert ((loss - want).abs() <= 2 * error).all()
    assert (loss[targets < 0] == 0).all()
    p = logits.softmax(1)
    want = (p * (lse[:, None] - logits)).sum(1)
    assert ((entropy(level, hidden, head) - want).abs() <= error).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_loss_reads_the_logits_of_linear(level, dtype):
    t, n, v = 70, 40, 2 * BLOCK + 5
    hidden, head, targets = draw(t, n, dtype=dtype, seed=1), draw(v, n, dtype=dtype, seed=2), targets_of(70, v)
    loss, lse = cross_entropy(level, hidden, head, targets)
    picked = logits_of(level, hidden, head).gather(1, targets[:, None])[:, 0]
    assert bits_equal(loss, lse - picked)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("v", [37, 3000])
def test_rows_do_not_know_their_batch(native, level, dtype, v):
    t, n = 150, 40
    hidden, head, targets = draw(t, n, dtype=dtype, seed=1), draw(v, n, dtype=dtype, seed=2), targets_of(150, v)
    native.set_num_threads(1)
    loss, lse = cross_entropy(level, hidden, head, targets)
    spread = entropy(level, hidden, head)
    native.set_num_threads(3)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(4))
    for rows in (slice(0, t), slice(0, 1), slice(5, 8), slice(100, 150), order):
        again = cross_entropy(level, hidden[rows], head, targets[rows])
        assert bits_equal(again[0], loss[rows])
        assert bits_equal(again[1], lse[rows])
        assert bits_equal(entropy(level, hidden[rows], head), spread[rows])


def one_row(level, logits):
    """lse and entropy of given logits: a hidden width of 1 passes them through."""
    head = torch.tensor(logits)[:, None]
    return cross_entropy(level, torch.ones(1, 1), head, torch.tensor([0]))[1].item(), entropy(
        level, torch.ones(1, 1), head
    ).item()


def test_extreme_logits(level):
    inf, nan = math.inf, math.nan
    assert one_row(level, [-inf] * 2000)[0] == -inf
    # A block without a finite logit adds nothing; exp(-inf) has no entropy.
    lse, spread = one_row(level, [-inf] * BLOCK + [3.0, 3.0] + [-inf] * 1500)
    assert lse == pytest.approx(3 + math.log(2))
    assert spread == pytest.approx(math.log(2))
    assert math.isnan(one_row(level, [0.0, nan] + [1.0] * 3000)[0])
    assert math.isnan(one_row(level, [0.0] * 1500 + [nan])[0])
    # Neither overflow nor underflow: 3e38 apart.
    assert one_row(level, [3e38] + [-3e38] * 2000) == (pytest.approx(3e38), 0.0)
    assert one_row(level, [-3e38] * 2000)[0] == pytest.approx(-3e38)
    # Peaked: the entropy is small and right, not a difference of large numbers.
    lse, spread = one_row(level, [1000.0] + [980.0] * 1100)
    p = 1100 * math.exp(-20)
    assert spread == pytest.approx(p * (1 + 20), rel=0.02)


def test_a_sum_in_blocks_is_what_its_rule_says(level):
    """Equal logits: the sum is exact, so every level and every block count gives the same bits as math."""
    for v in (1, 512, 1024, 1025, 4096):
        lse, spread = one_row(level, [2.0] * v)
        assert lse == pytest.approx(2 + math.log(v), rel=1e-7)
        assert spread == pytest.approx(math.log(v), rel=1e-6)


def test_edges(level):
    loss, lse = cross_entropy(level, torch.empty(0, 3), torch.ones(5, 3), torch.empty(0, dtype=torch.int64))
    assert loss.shape == lse.shape == entropy(level, torch.empty(0, 3), torch.ones(5, 3)).shape == (0,)
    loss, lse = cross_entropy(level, torch.ones(2, 3), torch.empty(0, 3), torch.tensor([-100, -100]))
    assert loss.tolist() == [0, 0]
    assert lse.tolist() == [-math.inf] * 2
    loss, lse = cross_entropy(level, torch.empty(2, 0), torch.empty(4, 0), torch.tensor([1, 2]))
    assert loss.tolist() == pytest.approx([math.log(4)] * 2)


@pytest.mark.parametrize("bad", [5, -1, -101, 2**40])
def test_wrong_targets_are_refused_before_anything_is_written(level, bad):
    loss, lse = torch.full((2,), 7.0), torch.full((2,), 7.0)
    with pytest.raises(ContractError, match=rf"targets\[1\] is {bad}, needs -100 \(ignored\) or 0 <= target < 5"):
        _C.linear_cross_entropy(level, torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, bad]), loss, lse)
    assert (loss == 7).all()
    assert (lse == 7).all()
