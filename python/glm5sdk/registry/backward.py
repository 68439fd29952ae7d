"""The derived op `<name>_bwd`: its rules, and autograd of the reference as its default body."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from glm5sdk.registry.shapes import AxisRule, TensorRule, parse_rule
from glm5sdk.registry.torch_op import gradients_of, owned

if TYPE_CHECKING:
    from glm5sdk.registry.spec import Op

__all__ = ["BackwardRules", "backward_rules", "gradient_shape", "reference_backward"]

_FLOAT_WORDS = ("a", "f32")


@dataclass(frozen=True)
class BackwardRules:
    """Signature and rules of a derived backward op.

    Attributes:
        signature: grad_<output>... for each float output, then the forward's parameters.
        inputs: rules by argument.
        outputs: grad_<argument> for each differentiable argument.
        grad_outputs: positions of the forward's float outputs.
    """

    signature: inspect.Signature
    inputs: dict[str, str]
    outputs: dict[str, str]
    grad_outputs: tuple[int, ...]


def backward_rules(
    name: str,
    signature: inspect.Signature,
    inputs: Mapping[str, TensorRule | AxisRule],
    outputs: Mapping[str, TensorRule],
    grad: tuple[str, ...],
) -> BackwardRules:
    """Derive the backward op's declaration from the forward's."""
    float_outputs = [
        (i, o, r)
        for i, (o, r) in enumerate(outputs.items())
        if r.word in _FLOAT_WORDS or r.word in signature.parameters
    ]
    grads = [
        inspect.Parameter(f"grad_{o}", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor")
        for _, o, _ in float_outputs
    ]
    forward = [p.replace(default=inspect.Parameter.empty) for p in signature.parameters.values()]
    grad_rules = {
        f"grad_{o}": f"{'any' if r.word in signature.parameters else r.word}[{_dims(r)}]" for _, o, r in float_outputs
    }
    out_rules = {}
    for argument in grad:
        rule = inputs[argument]
        assert isinstance(rule, TensorRule), f"{name}: grad names {argument}, which is no tensor"
        dims = (
            f"{rule.dims[0].text}, {rule.dims[1].text}, {'+'.join(d.text for d in rule.dims[2:])}"
            if rule.is_cache
            else _dims(rule)
        )
        out_rules[f"grad_{argument}"] = f"{'f32' if rule.word == 'f32' else 'a'}[{dims}]"
    return BackwardRules(
        inspect.Signature(grads + forward),
        {**grad_rules, **{k: str(v) for k, v in inputs.items()}},
        out_rules,
        tuple(i for i, _, _ in float_outputs),
    )


def _dims(rule: TensorRule) -> str:
    return ", ".join(d.text for d in rule.dims)


def gradient_shape(op: Op[..., Any], rules: BackwardRules, args: Sequence[Any], argument: str) -> tuple[int, ...]:
    """Shape of an argument's gradient by its rule, also where the argument is absent or a cache of bytes."""
    axes = dict(zip(op.contract.axes, op.contract.bind(*args).axes, strict=True))
    rule = parse_rule(rules.outputs[f"grad_{argument}"])
    return tuple(dim.evaluate(axes) for dim in rule.dims) if isinstance(rule, TensorRule) else ()


def reference_backward(op: Op[..., Any], rules: BackwardRules, body: Callable[..., Any] | None) -> Callable[..., Any]:
    """The reference of `<name>_bwd`: the op's own formula if it gives one, else autograd of its reference."""

    def backward(*args: Any) -> Any:
        if body is not None:
            return owned(body(*args), args)
        count = len(rules.grad_outputs)
        shape_of = partial(gradient_shape, op, rules, args[count:])
        found = gradients_of(
            op.reference, op.signature, op.grad, rules.grad_outputs, args[:count], args[count:], shape_of
        )
        return owned(found[0] if len(found) == 1 else found, args)

    backward.__name__ = f"{op.name}_bwd"
    backward.__doc__ = (
        f"Gradients of `{op.name}`: (grad of each float output..., its inputs...) -> grad of {', '.join(op.grad)}."
    )
    backward.__signature__ = rules.signature  # type: ignore[attr-defined]
    return backward
