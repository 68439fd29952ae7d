"""An op's contract compiled to Python: the checks a call pays for, written out once per op instead of interpreted.

`compile_contract` turns signature and rules into four functions:

    bind(*args, **kwargs)   check everything; -> Bound
    alloc(bound)            fresh outputs
    flatten(*args, **kw)    arguments as torch.library wants them (a weight becomes tensors, tag, shape)
    unflatten(*flat)        the inverse

The generated source is kept in `Contract.source` for whoever wants to read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import contract_errors as errors
from glm5sdk.registry.contract_scalars import READERS, as_size, scalar_kind, scalar_lines
from glm5sdk.registry.contract_source import (
    DTYPE_NAMES,
    BindWriter,
    Rules,
    alloc_source,
    condition_lines,
    flatten_source,
    parameter_list,
    tuple_of,
    unflatten_source,
)
from glm5sdk.registry.device import CONTRACT_NAMESPACE
from glm5sdk.registry.formats import BYTE_FORMATS, cache_shape, page_size_of
from glm5sdk.registry.shapes import TensorRule
from glm5sdk.registry.weight import Weight, from_parts

__all__ = ["Bound", "Contract", "compile_contract"]


class Bound(NamedTuple):
    """One checked call.

    Attributes:
        args: positional arguments, inputs contiguous, defaults filled in.
        axes: sizes, in the order of `Contract.axes`.
        key: what selection may look at: device type, dtypes, options, weight tags, axes that are not batch-like.
        device: torch device of all tensors.
        activation: dtype behind the word `a`.
        accumulator: dtype behind the word `f32`.
        view: whether the call must go through torch.library (gradients, tensor subclasses).
    """

    args: tuple[Any, ...]
    axes: tuple[int, ...]
    key: tuple[Any, ...]
    device: Any
    activation: Any
    accumulator: Any
    view: bool


@dataclass(frozen=True)
class Contract:
    """What compile_contract returns; see the module's head."""

    bind: Callable[..., Bound]
    alloc: Callable[[Bound], tuple[Any, ...]]
    flatten: Callable[..., tuple[Any, ...]]
    unflatten: Callable[..., tuple[Any, ...]]
    axes: tuple[str, ...]
    static_axes: tuple[str, ...]
    options: tuple[str, ...]
    source: str


def compile_contract(
    name: str,
    signature: inspect.Signature,
    inputs: Rules,
    outputs: Mapping[str, TensorRule],
    mutates: tuple[str, ...],
    batch_axes: frozenset[str],
    where: Sequence[str] = (),
) -> Contract:
    """Compile one op's contract.

    Args:
        name: the op.
        signature: of the public function; parameter names, order and defaults.
        inputs: rule of each tensor, weight and axis argument.
        outputs: rule of each output.
        mutates: arguments written in place.
        batch_axes: axes that selection must not look at.
        where: what sizes and scalars must satisfy beyond the rules, as Python over their names.
    """
    parameters = list(signature.parameters)
    if unknown := [n for n in inputs if n not in parameters]:
        raise ContractError(f"{name}: rules for {unknown}, needs names among the parameters {parameters}")
    writer = BindWriter(inputs, mutates)
    axes = tuple(writer.axes)
    if clash := sorted(set(axes) & set(parameters)):
        raise ContractError(f"{name}: axes {clash} are named like parameters, need names of their own")
    static = tuple(a for a in axes if a not in batch_axes)
    options = tuple(p for p in parameters if p not in inputs and _is_option(signature.parameters[p]))
    weights = [p for p, r in inputs.items() if isinstance(r, TensorRule) and r.is_weight]
    tags = [f"'plain/plain' if isinstance({w}, Tensor) else {w}.tag" for w in weights]
    key = tuple_of(["'cpu' if _cpu else _device.type", "_a", *static, *options, *tags])
    bound = [tuple_of(parameters), tuple_of(axes), key, "_device", "_a", "_acc", "_view or _grad"]
    scalars = {p: q for p, q in signature.parameters.items() if p not in inputs}
    named = [*axes, *(p for p, q in scalars.items() if scalar_kind(q)[0]), *DTYPE_NAMES]
    lines = [
        *[line for p, q in scalars.items() for line in scalar_lines(p, q)],
        *writer.lines,
        *condition_lines(where, named),
        *_gradient_lines(inputs, mutates),
        *_overlap_lines(inputs, mutates),
        # Tensors without data have only a fake form.
        "if not _cpu and _device is not None and _device.type == 'meta':",
        "    _view = True",
        f"return _new(Bound, {tuple_of(bound)})",
    ]
    source = "\n".join(
        [f"def bind({parameter_list(signature)}):", *["    " + line for line in lines], ""]
        + [*alloc_source(inputs, outputs, axes, parameters), "", *flatten_source(signature, weights), ""]
        + unflatten_source(parameters, weights)
    )
    defaults = {f"_default_{p}": q.default for p, q in signature.parameters.items() if q.default is not q.empty}
    namespace = {
        **CONTRACT_NAMESPACE, **defaults, "OP": name, "errors": errors, "Bound": Bound, "Weight": Weight,
        "cache_shape": cache_shape, "page_size_of": page_size_of, "BYTE_FORMATS": BYTE_FORMATS,
        "from_parts": from_parts, "_new": tuple.__new__, "scalars": READERS, "as_size": as_size,
        "is_contiguous": errors.is_contiguous,
    }  # fmt: skip
    exec(compile(source, f"<contract of {name}>", "exec"), namespace)
    bind, alloc, flatten, unflatten = (namespace[f] for f in ("bind", "alloc", "flatten", "unflatten"))
    bind.__qualname__ = flatten.__qualname__ = name  # Python's own errors about missing arguments name the op
    return Contract(bind, alloc, flatten, unflatten, axes, static, options, source)


def _gradient_lines(inputs: Rules, mutates: tuple[str, ...]) -> list[str]:
    """Whether a gradient is wanted, and the refusal where something is written in place."""
    terms = []
    for p, rule in inputs.items():
        if isinstance(rule, TensorRule) and (rule.word in ("a", "f32", "any", "W") or rule.is_cache):
            terms.append(f"{p} is not None and {p}.requires_grad" if rule.optional else f"{p}.requires_grad")
    lines = [f"_grad = grad_enabled() and ({' or '.join(terms) or False})"]
    if mutates:
        lines += ["if _grad:", f"    raise errors.inference_only(OP, {mutates!r})"]
    return lines


def _overlap_lines(inputs: Rules, mutates: tuple[str, ...]) -> list[str]:
    """The refusal of inputs that lie in the memory an op writes; tensors without memory of their own are not asked.

    Addresses of plain tensors are compared here and now: ops that write caches run once a layer and token, with a
    dozen inputs each.
    """
    if not mutates:
        return []
    read = {p: r for p, r in inputs.items() if isinstance(r, TensorRule) and p not in mutates}
    lines = []
    for m in mutates:
        lines += [f"_begin = {m}.data_ptr()", f"_end = _begin + {m}.nbytes"]
        for p, rule in read.items():
            plain = [
                f"if (_at := {p}.data_ptr()) < _end and _begin < _at + {p}.nbytes:",
                f"    raise errors.overlap(OP, {m!r}, {p!r})",
            ]
            if rule.is_weight:
                lines += [
                    f"if isinstance({p}, Weight):",
                    f"    errors.check_overlap(OP, {m!r}, _begin, _end, {p!r}, {p}.tensors)",
                    *["el" + plain[0], plain[1]],
                ]
            elif rule.optional:
                lines += [f"if {p} is not None:", *("    " + line for line in plain)]
            else:
                lines += plain
    return ["if _cpu and not _view:", *("    " + line for line in lines)]


def _is_option(parameter: inspect.Parameter) -> bool:
    """Strings, switches and dtypes steer selection; plain numbers never do."""
    return any(word in str(parameter.annotation) for word in ("str", "bool", "dtype"))
