"""The registry seen by torch: every op as `torch.ops.glm5.<name>` with a fake form and a gradient.

Only compiled code, gradients and tensor subclasses take this road; plain calls go straight to the implementation. Both
use the same contract and the same selection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import contract_errors as errors
from glm5sdk.registry import select
from glm5sdk.registry.shapes import AxisRule, TensorRule

if TYPE_CHECKING:
    from glm5sdk.registry.spec import Op

__all__ = ["TorchView", "gradients_of", "is_compiling", "owned"]

NAMESPACE = "glm5"
_library = Library(NAMESPACE, "DEF")
is_compiling = torch.compiler.is_compiling


class TorchView:
    """One op in torch.library. Call it with arguments in flattened form."""

    def __init__(self, op: Op[..., Any]) -> None:
        self._op = op
        schema = _schema(op)
        _library.define(schema)
        qualified = f"{NAMESPACE}::{op.name}"
        _library.impl(op.name, _kernel(op), "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, _fake(op), lib=_library)
        if not op.mutates:
            setup, backward = _autograd(op) if op.grad else _no_gradient(op)
            torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), op.name).default

    def __call__(self, flat: tuple[Any, ...]) -> Any:
        result = self.overload(*flat)
        return tuple(result) if isinstance(result, list) else result


def _kernel(op: Op[..., Any]) -> Callable[..., Any]:
    def kernel(*flat: Any) -> Any:
        return op.call_flat(*flat)

    return kernel


def _fake(op: Op[..., Any]) -> Callable[..., Any]:
    def fake(*flat: Any) -> Any:
        outs = op.contract.alloc(op.contract.bind(*op.contract.unflatten(*flat)))
        return None if not outs else outs[0] if len(outs) == 1 else outs

    return fake


def _schema(op: Op[..., Any]) -> str:
    arguments = []
    for name, parameter in op.signature.parameters.items():
        rule = op.inputs.get(name)
        if isinstance(rule, TensorRule) and rule.is_weight:
            arguments += [f"Tensor[] {name}", f"str {name}_tag", f"SymInt[] {name}_shape"]
        elif isinstance(rule, TensorRule):
            alias = f"({chr(ord('a') + op.mutates.index(name))}!)" if name in op.mutates else ""
            arguments.append(f"Tensor{alias}{'?' if rule.optional else ''} {name}")
        elif isinstance(rule, AxisRule):
            arguments.append(f"SymInt {name}")
        else:
            arguments.append(f"{_scalar_type(op.name, parameter)} {name}")
    returns = ", ".join("Tensor" for _ in op.outputs)
    return f"{op.name}({', '.join(arguments)}) -> {returns if len(op.outputs) == 1 else f'({returns})'}"


def _scalar_type(op: str, parameter: inspect.Parameter) -> str:
    words = inspect.formatannotation(parameter.annotation).strip("'").replace(" ", "")
    optional = "?" if "None" in words else ""
    for word, schema in (
        ("bool", "bool"),
        ("float", "float"),
        ("int", "SymInt"),
        ("str", "str"),
        ("dtype", "ScalarType"),
    ):
        if words.removesuffix("|None").rpartition(".")[2] == word:
            return schema + optional
    raise ContractError(
        f"{op}: {parameter.name} is annotated {words}, needs Tensor with a rule, bool, int, float, str or dtype"
    )


def _no_gradient(op: Op[..., Any]) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Autograd of an op without a gradient: silence would train on zeros."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        ctx.mark_non_differentiable(*[o for o in outputs if not o.is_floating_point()])

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise errors.no_gradient(op.name)

    return setup, backward


def _autograd(op: Op[..., Any]) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Context saver and backward of one op, both in flattened form."""
    differentiable = op.grad

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors: list[Tensor] = []
        layout: list[Any] = []
        for value in inputs:
            if isinstance(value, Tensor):
                layout.append(len(tensors))
                tensors.append(value)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
                layout.append(range(len(tensors), len(tensors) + len(value)))
                tensors += value
            else:
                layout.append((value,))
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        ctx.save_for_backward(*tensors)
        ctx.layout = layout
        # The output's dtype and shape are enough to stand in for a gradient that nobody asked for.
        ctx.outputs = [(o.shape, o.dtype, o.device) for o in outputs]
        ctx.use = select.current_use()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o in outputs if not o.is_floating_point()])

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        flat = [
            saved[item] if isinstance(item, int) else [saved[i] for i in item] if isinstance(item, range) else item[0]
            for item in ctx.layout
        ]
        given = [
            g if g is not None else torch.zeros(shape, dtype=dtype, device=device)
            for g, (shape, dtype, device) in zip(grads, ctx.outputs, strict=True)
            if dtype.is_floating_point
        ]
        derived = op.backward
        assert derived is not None
        with select.restore(ctx.use or None):
            found = derived.view(tuple(given) + tuple(flat))
        found = (found,) if isinstance(found, Tensor) else found
        by_name = dict(zip(differentiable, found, strict=True))
        return tuple(_place(op, by_name, flat))

    return setup, backward


def _place(op: Op[..., Any], by_name: dict[str, Tensor], flat: Sequence[Any]) -> list[Any]:
    """Gradients in the order and structure of the flattened inputs."""
    result: list[Any] = []
    position = 0
    for name in op.signature.parameters:
        rule = op.inputs.get(name)
        value, grad = flat[position], by_name.get(name)
        if isinstance(rule, TensorRule) and rule.is_weight:
            plain = grad is not None and flat[position + 1] == "plain/plain"
            result += [[_like(grad, value[0]) if plain else None] + [None] * (len(value) - 1), None, None]
            position += 3
        else:
            result.append(None if grad is None or value is None else _like(grad, value))
            position += 1
    return result


def _like(grad: Tensor | None, value: Tensor) -> Tensor | None:
    """Gradients are rounded to the tensor's dtype at the op's boundary."""
    return grad if grad is None or grad.dtype == value.dtype else grad.to(value.dtype)


def gradients_of(
    reference: Callable[..., Any],
    signature: inspect.Signature,
    wanted: tuple[str, ...],
    grad_outputs: tuple[int, ...],
    grads: Sequence[Tensor],
    args: Sequence[Any],
    shape_of: Callable[[str], tuple[int, ...]],
) -> tuple[Tensor, ...]:
    """Autograd of a reference.

    Args:
        reference: plain torch function.
        signature: its signature.
        wanted: arguments to differentiate.
        grad_outputs: positions of the outputs that `grads` belong to.
        grads: gradients of those outputs.
        args: positional arguments.
        shape_of: shape of the gradient of an argument that is absent or holds no floats.

    Returns:
        One gradient per wanted argument, zeros where the output does not depend on it.
    """
    names = list(signature.parameters)
    values = list(args)
    leaves: list[Tensor | None] = []
    # A backward pass runs below autograd's dispatch keys; recomputing under autograd needs them back.
    with _autograd_keys(), torch.enable_grad():
        for name in wanted:
            i = names.index(name)
            data = values[i].tensors[0] if hasattr(values[i], "tensors") else values[i]
            if data is None or not data.is_floating_point():
                leaves.append(None)
                continue
            leaf = data.detach().requires_grad_(True)
            leaves.append(leaf)
            if data is values[i]:
                values[i] = leaf
        outs = reference(*values)
        outs = (outs,) if isinstance(outs, Tensor) else outs
        pairs = [(outs[i], g) for i, g in zip(grad_outputs, grads, strict=True) if outs[i].requires_grad]
        real = [leaf for leaf in leaves if leaf is not None]
        found: Sequence[Tensor | None] = [None] * len(real)
        if pairs:
            found = torch.autograd.grad([o for o, _ in pairs], real, [g for _, g in pairs], allow_unused=True)
    result, remaining = [], iter(found)
    for leaf, name in zip(leaves, wanted, strict=True):
        grad = next(remaining) if leaf is not None else None
        value = args[names.index(name)]
        if grad is None:
            shape = tuple(value.shape) if leaf is not None else shape_of(name)
            device, dtype = next((a.device, a.dtype) for a in args if isinstance(a, Tensor))
            grad = torch.zeros(shape, dtype=leaf.dtype if leaf is not None else dtype, device=device)
        result.append(grad.contiguous())
    return tuple(result)


def owned(results: Any, args: Sequence[Any]) -> Any:
    """Results in storage of their own: a sum's gradient is its output's, but torch forbids ops to return inputs."""
    taken = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
    owned = []
    for result in (results,) if isinstance(results, Tensor) else results:
        owned.append(result.clone() if result.untyped_storage().data_ptr() in taken else result)
        taken.add(owned[-1].untyped_storage().data_ptr())
    return owned[0] if isinstance(results, Tensor) else tuple(owned)


def _autograd_keys() -> Any:
    keys = torch._C
    included = keys._dispatch_tls_local_include_set()
    excluded = keys._dispatch_tls_local_exclude_set()
    for key in (
        keys.DispatchKey.AutogradCPU,
        keys.DispatchKey.AutogradCUDA,
        keys.DispatchKey.AutogradPrivateUse1,
        keys.DispatchKey.AutogradOther,
        keys.DispatchKey.AutogradFunctionality,
        keys.DispatchKey.ADInplaceOrView,
    ):
        excluded = excluded.remove(key) if hasattr(excluded, "remove") else excluded - keys.DispatchKeySet(key)
    return keys._ForceDispatchKeyGuard(included, excluded)
