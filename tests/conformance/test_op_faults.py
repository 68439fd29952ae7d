"""Faults in a declaration rather than in a kernel: wrong rules, wrong formulas, aliases, broken properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5sdk.registry import Op, TestRules, op
from glm5sdk.testing import TIERS, CheckFailed, check_pair
from glm5sdk.testing.torch_checks import check_compile, check_gradients, check_opcheck

SIZES = TestRules(geometries=({"T": 3, "N": 4}, {"T": 5, "N": 33}))


def declare(name: str, body: Callable[..., Any], **more: Any) -> Op[..., Any]:
    """An op of one argument `x` [T, N]."""
    body.__name__ = f"conformance_{name}"
    rules = {"outputs": {"y": "a[T, N]"}, "tests": SIZES, "rows": "T", **more}
    return op(inputs={"x": "a[T, N]"}, **rules)(body)


def caught(declared: Op[..., Any], impl: str = "reference") -> CheckFailed:
    """The failure of a pair."""
    with pytest.raises(CheckFailed) as error:
        check_pair(declared, impl, TIERS["smoke"])
    return error.value


@pytest.mark.parametrize(
    ("output", "words"), [("f32[T, N]", "torch.float32"), ("a[N, T]", r"(4, 3)|(33, 5)"), ("i32[T, N]", "torch.int32")]
)
def test_a_rule_that_the_reference_does_not_keep(output: str, words: str) -> None:
    def body(x: Tensor) -> Tensor:
        return 2 * x.to(torch.bfloat16 if x.dtype != torch.float64 else x.dtype).to(x.dtype)

    declared = declare(f"rule_{output[0]}{len(output)}{output[2]}{output[-2]}", body, outputs={"y": output})
    failure = caught(declared)
    assert failure.check == "fake"
    assert any(word in str(failure) for word in words.split("|"))


def test_a_decomposition_that_looks_at_its_batch() -> None:
    def body(x: Tensor) -> Tensor:
        return x + 0.5

    declared = declare("batch", body, composed=lambda x: x + 0.5 + torch.finfo(x.dtype).eps * (len(x) > 4))
    assert caught(declared, "composed").check == "rows"


def test_a_decomposition_that_is_wrong() -> None:
    def body(x: Tensor) -> Tensor:
        return x.square()

    assert caught(declare("wrong", body, composed=lambda x: x.abs()), "composed").check == "right"


def test_a_property_that_does_not_hold() -> None:
    def body(x: Tensor) -> Tensor:
        return x + 1

    def is_positive(arguments: Any, outs: tuple[Tensor, ...]) -> None:
        assert bool((outs[0] > 0).all()), "an output is negative"

    rules = TestRules(geometries=({"T": 9, "N": 99},) * 3, properties=(is_positive,))
    failure = caught(declare("property", body, tests=rules))
    assert failure.check == "property"
    assert "is_positive: an output is negative" in str(failure)


def test_a_comparison_of_the_ops_own_decides() -> None:
    def body(x: Tensor) -> Tensor:
        return x + 1

    def never(arguments: Any, got: Any, want64: Any, tolerance: float) -> None:
        raise AssertionError(f"{len(got)} outputs, tolerance {tolerance:.1g}")

    rules = TestRules(geometries=SIZES.geometries, compare=never)
    assert "1 outputs, tolerance" in str(caught(declare("compare", body, tests=rules)))


def test_a_gradient_formula_that_is_wrong() -> None:
    def body(x: Tensor) -> Tensor:
        return x.square()

    declared = declare("gradient", body, grad=("x",), backward=lambda grad_y, x: grad_y * x)
    assert declared.backward is not None
    assert caught(declared.backward).check == "right"
    with pytest.raises(CheckFailed, match="check 'gradients': conformance_gradient f32: grad_x"):
        check_gradients(declared, "f32")


def test_an_output_that_is_an_input() -> None:
    def body(x: Tensor) -> Tensor:
        return x

    with pytest.raises(CheckFailed, match="check 'opcheck': conformance_alias"):
        check_opcheck(declare("alias", body))


def test_what_is_right_passes() -> None:
    def body(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.square() if bias is None else x.square() + bias

    body.__name__ = "conformance_right"
    declared = op(
        inputs={"x": "a[T, N]", "bias": "a[N]?"},
        outputs={"y": "a[T, N]"},
        rows="T",
        grad=("x", "bias"),
        composed=lambda x, bias=None: body(x, bias),
        tests=SIZES,
    )(body)
    assert declared.backward is not None
    for each, impl in ((declared, "reference"), (declared, "composed"), (declared.backward, "reference")):
        assert check_pair(each, impl, TIERS["test"]).examples >= 20
    check_opcheck(declared)
    check_compile(declared)
    for dtype in ("f32", "bf16"):
        check_gradients(declared, dtype)
