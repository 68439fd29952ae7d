"""linear_entropy: against plain loops, torch, and float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

from glm5sdk import ops
from glm5sdk.ops import _logsumexp


def test_equals_loops() -> None:
    hidden, head = torch.randn(4, 6).double(), torch.randn(9, 6).double()
    got = ops.linear_entropy.reference(hidden, head)
    for t in range(4):
        logits = (head @ hidden[t]).tolist()
        total = math.fsum(map(math.exp, logits))
        p = [math.exp(v) / total for v in logits]
        assert float(got[t]) == pytest.approx(-math.fsum(q * math.log(q) for q in p), rel=1e-11)


def test_a_sharp_and_a_flat_distribution() -> None:
    head = torch.eye(2048)
    sharp = 100 * torch.eye(2048)[:1] + 1000  # everything shifted: lse - E[logit] would lose four digits
    got = ops.linear_entropy.reference(torch.cat((sharp, torch.zeros(1, 2048))), head)
    assert abs(float(got[0])) < 1e-5
    assert float(got[1]) == pytest.approx(math.log(2048), rel=1e-6)


def test_chunks_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = torch.randn(9, 5).double(), torch.randn(1030, 5).double()
    want = torch.distributions.Categorical(logits=hidden @ head.T).entropy()
    monkeypatch.setattr(_logsumexp, "_CHUNK_ELEMENTS", 1030 * 4)
    torch.testing.assert_close(ops.linear_entropy.reference(hidden, head), want)
    check_backward(ops.linear_entropy, hidden, head)


def test_no_rows_and_opcheck() -> None:
    assert ops.linear_entropy.reference(torch.ones(0, 3), torch.ones(7, 3)).shape == (0,)
    opcheck(ops.linear_entropy, leaf(6, 5), leaf(11, 5, seed=1))
