"""What is right: the reference in float64 and in the implementation's own dtype, with gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from glm5sdk.registry import Op
from glm5sdk.registry.backward import backward_rules, gradient_shape
from glm5sdk.registry.torch_op import gradients_of
from glm5sdk.testing.inputs import Example, arguments, clone, forward_of, widen

__all__ = ["Oracle", "consult", "named_results"]


@dataclass(frozen=True)
class Oracle:
    """One example and its right answers, all on the CPU.

    Attributes:
        arguments: as drawn; never written.
        same: results of the reference in the same dtype: outputs, then mutated arguments, by name.
        wide: results of the reference in float64.
    """

    arguments: dict[str, Any]
    same: dict[str, Tensor]
    wide: dict[str, Tensor]


@lru_cache(maxsize=32)
def consult(op: Op[..., Any], example: Example) -> Oracle:
    """Draw an example and ask the reference twice; kept while several implementations look at the same example."""
    drawn = arguments(op, example)
    function = _right_answer(op)
    return Oracle(drawn, _run(op, function, clone(drawn)), _run(op, function, widen(drawn)))


def _run(op: Op[..., Any], function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Tensor]:
    with torch.no_grad():
        return named_results(op, function(*values.values()), values)


def named_results(op: Op[..., Any], returned: Any, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a call produced: outputs by name, then the arguments it wrote to."""
    outs = () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)
    named = dict(zip(op.outputs, outs, strict=True))
    return {**named, **{name: values[name] for name in op.mutates}}


def _right_answer(op: Op[..., Any]) -> Callable[..., Any]:
    """The reference; for a gradient op autograd of the forward's reference, whatever formula the op has."""
    forward = forward_of(op)
    if forward is None:
        return op.reference
    rules = backward_rules(forward.name, forward.signature, forward.inputs, forward.outputs, forward.grad)
    count = len(rules.grad_outputs)

    def gradients(*values: Any) -> tuple[Tensor, ...]:
        given = values[count:]
        shape_of = partial(gradient_shape, forward, rules, given)
        return gradients_of(
            forward.reference, forward.signature, forward.grad, rules.grad_outputs, values[:count], given, shape_of
        )

    return gradients
