"""window_stride_indices: against the rule itself, for every small case."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_oracle import i32, padded

from glm5sdk import ops
from glm5sdk.core.errors import ContractError


def test_equals_the_rule() -> None:
    lengths = list(range(24))
    for window, stride, topk in itertools.product((0, 1, 3, 8, 30), (1, 2, 5, 40), (0, 1, 6, 30)):
        got = ops.window_stride_indices.reference(i32(lengths), window, stride, topk)
        assert got.dtype == torch.int32
        for length, row in zip(lengths, got[:, 0].tolist(), strict=True):
            pattern = [p for p in range(length) if p >= length - window or p % stride == 0]
            assert row == padded(pattern[max(0, len(pattern) - topk) :], topk)


def test_the_pattern_of_the_public_description() -> None:
    got = ops.window_stride_indices.reference(i32([1000]), 512, 64, 2048)[0, 0]
    assert got[:8].tolist() == [0, 64, 128, 192, 256, 320, 384, 448]
    assert got[8:520].tolist() == list(range(488, 1000))
    assert (got[520:] == -1).all()


@pytest.mark.parametrize(("lengths", "window", "stride"), [([3], -1, 2), ([3], 1, 0), ([-1], 1, 2)])
def test_bad_values_are_refused(lengths: list[int], window: int, stride: int) -> None:
    with pytest.raises(ContractError, match="window_stride_indices"):
        ops.window_stride_indices.reference(i32(lengths), window, stride, 4)
