"""Contracts: conditions on axes beyond the shape rules, and axes that only an optional tensor names."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract import Contract, compile_contract
from glm5sdk.registry.shapes import TensorRule, parse_rule


def contract(*where: str) -> Contract:
    def example(x: Tensor, extra: Tensor | None = None) -> Tensor:
        return x

    out = parse_rule("a[T]")
    assert isinstance(out, TensorRule)
    inputs = {"x": parse_rule("a[T, N]"), "extra": parse_rule("i32[T, K]?")}
    return compile_contract("example", inspect.signature(example), inputs, {"y": out}, (), frozenset("T"), where)


def test_condition_is_checked_and_explained() -> None:
    bind = contract("N % 2 == 0", "K <= N").bind
    bind(torch.ones(3, 4), torch.ones(3, 4, dtype=torch.int32))
    with pytest.raises(ContractError, match="example: N is 3, needs N % 2 == 0"):
        bind(torch.ones(3, 3))
    with pytest.raises(ContractError, match="N is 4, K is 5, needs K <= N"):
        bind(torch.ones(3, 4), torch.ones(3, 5, dtype=torch.int32))


def test_condition_on_an_unknown_axis_is_refused_when_declared() -> None:
    with pytest.raises(ContractError, match="names \\['Z'\\]"):
        contract("Z == 1")


def test_axis_of_an_absent_tensor_is_zero() -> None:
    made = contract()
    axes = dict(zip(made.axes, made.bind(torch.ones(3, 4)).axes, strict=True))
    assert axes == {"T": 3, "N": 4, "K": 0}
    axes = dict(zip(made.axes, made.bind(torch.ones(3, 4), torch.ones(3, 7, dtype=torch.int32)).axes, strict=True))
    assert axes["K"] == 7
    with pytest.raises(ContractError, match="extra"):
        made.bind(torch.ones(3, 4), torch.ones(2, 7, dtype=torch.int32))


def test_gradient_ops_keep_the_condition() -> None:
    backward = ops.rope.backward
    assert backward is not None
    assert backward.where == ops.rope.where == ("R % 2 == 0",)
