"""What each op promises torch, whatever runs it: opcheck, one graph when compiled, gradients that match float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.registry import Op
from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import Example, clone, forward_of, geometries, tensors_of
from glm5sdk.testing.oracle import consult, named_results
from glm5sdk.testing.pair import find_impl
from glm5sdk.testing.tolerance import compare_results, same_bits

__all__ = ["check_compile", "check_gradients", "check_opcheck"]


def small_example(op: Op[..., Any], dtype: str = "f32") -> Example:
    """The smallest geometry that has rows, with the options and values of its index."""
    fixed = geometries(op, find_impl(op, "reference"))
    rows = (forward_of(op) or op).rows
    some = [e for e in fixed if rows is None or dict(e.axes)[rows] > 0] or fixed
    best = min(some, key=lambda e: sum(size for _, size in e.axes))
    return Example(best.index, best.axes, dtype, False, best.seed)


def _differentiable(op: Op[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with `requires_grad` on those that have a gradient and hold floats."""
    return {
        n: v.requires_grad_() if n in op.grad and isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in clone(values).items()
    }


def check_opcheck(op: Op[..., Any]) -> None:
    """torch.library.opcheck: schema, fake form, autograd registration, dynamic shapes.

    Raises:
        CheckFailed: `opcheck`.
    """
    plain = consult(op, small_example(op)).arguments
    values = _differentiable(op, plain)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(t.is_floating_point() and t.element_size() == 1 for t in tensors_of(plain).values()):
        tests.remove("test_schema")  # it multiplies every input, and torch cannot multiply float8
    whole = {name for name, rule in op.outputs.items() if rule.word.startswith(("i", "u"))}
    try:
        for test in tests:
            # Its sum over outputs starts in the first one's dtype, so whole numbers before floats break its gradient.
            mixed = test == "test_aot_dispatch_dynamic" and 0 < len(whole) < len(op.outputs)
            flat = op.contract.flatten(*(plain if mixed else values).values())
            torch.library.opcheck(op.view.overload, flat, test_utils=test)
    except Exception as error:
        raise CheckFailed("opcheck", f"{op.name}: {error}") from error


def check_compile(op: Op[..., Any]) -> None:
    """Compiled without a graph break the op gives the bits it gives otherwise.

    Raises:
        CheckFailed: `compile`.
    """
    values = consult(op, small_example(op)).arguments
    constants = {n: v for n, v in values.items() if not isinstance(v, Tensor)}

    def call(tensors: dict[str, Tensor]) -> Any:
        merged = {**constants, **tensors}
        return op(*[merged[n] for n in op.signature.parameters])

    torch._dynamo.reset()
    with torch.no_grad():
        mine, eager = clone(values), clone(values)
        want = named_results(op, op(*eager.values()), eager)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
        got = named_results(op, compiled({n: v for n, v in mine.items() if isinstance(v, Tensor)}), mine)
    torch._dynamo.reset()
    for name, tensor in want.items():
        if not same_bits(got[name], tensor):
            raise CheckFailed("compile", f"{op.name}: {name} has other bits compiled than eager")


def check_gradients(op: Op[..., Any], dtype: str) -> None:
    """Autograd through the op, by whatever backward is selected, against float64 autograd of the reference.

    Raises:
        CheckFailed: `gradients`.
    """
    derived = op.backward
    if derived is None:
        return
    oracle = consult(derived, small_example(derived, dtype))
    values = _differentiable(op, {n: v for n, v in oracle.arguments.items() if n in op.signature.parameters})
    leaves = {n: values[n] for n in op.grad if isinstance(values[n], Tensor) and values[n].requires_grad}
    if not leaves:
        return
    results = named_results(op, op(*values.values()), values)
    pairs = [(results[o], oracle.arguments[f"grad_{o}"]) for o in op.outputs if f"grad_{o}" in derived.inputs]
    pairs = [(out, grad) for out, grad in pairs if out.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], materialize_grads=True
    )
    got = dict(oracle.same)
    for name, grad in zip(leaves, found, strict=True):
        got[f"grad_{name}"] = grad
    try:
        compare_results(derived, oracle, got, exact=False)
    except CheckFailed as error:
        raise CheckFailed("gradients", f"{op.name} {dtype}: {error.sentence}") from error
