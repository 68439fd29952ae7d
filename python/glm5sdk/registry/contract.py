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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import contract_errors as errors
from glm5sdk.registry.device import CONTRACT_NAMESPACE
from glm5sdk.registry.formats import cache_shape, is_byte_format, page_size_of
from glm5sdk.registry.shapes import AxisRule, Dim, TensorRule
from glm5sdk.registry.weight import Weight, from_parts

__all__ = ["Bound", "Contract", "compile_contract"]

Rules = Mapping[str, "TensorRule | AxisRule"]


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


class _Writer:
    """Lines of a function body, and which axes are known so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += ["    " + line for line in lines]

    def learn(self, axis: str, expression: str, argument: str) -> None:
        """Bind an axis, or check it against what an earlier argument said."""
        if axis in self.known:
            self.add(f"if {axis} != {expression}:", f"    raise errors.axis(OP, {axis!r}, {axis}, {argument!r}, {expression})")
        else:
            self.known.append(axis)
            self.add(f"{axis} = {expression}")

    def dim(self, dim: Dim, size: str, argument: str) -> bool:
        """Write the check of one compound dimension; False when two of its axes are still unknown."""
        unknown = sorted({n for n in dim.names() if n not in self.known})
        if len(unknown) > 1:
            return False
        if unknown:
            numerator, divisor = dim.solve_for(unknown[0])
            self.add(f"_size = {size}", f"_rest = {numerator}")  # no divmod: sizes may be symbolic
            if divisor == "1":
                self.add(f"{unknown[0]} = _rest", "if _rest < 0:")
            else:
                self.add(f"{unknown[0]} = _rest // ({divisor}) if ({divisor}) else 0")
                self.add(f"if _rest < 0 or {unknown[0]} * ({divisor}) != _rest:")
            self.add(f"    raise errors.dim(OP, {argument!r}, {dim.text!r}, _size)")
            self.known.append(unknown[0])
        else:
            self.add(f"if {size} != {python(dim)}:", f"    raise errors.dim(OP, {argument!r}, {dim.text!r}, {size}, {python(dim)})")
        return True


def python(dim: Dim) -> str:
    """The dimension as a Python expression over axis names."""
    return " + ".join("*".join(([str(f)] if f != 1 or not names else []) + list(names)) for f, names in dim.terms)


def compile_contract(
    name: str,
    signature: inspect.Signature,
    inputs: Rules,
    outputs: Mapping[str, TensorRule],
    mutates: tuple[str, ...],
    grad: tuple[str, ...],
    batch_axes: frozenset[str],
) -> Contract:
    """Compile one op's contract.

    Args:
        name: the op.
        signature: of the public function; parameter names, order and defaults.
        inputs: rule of each tensor, weight and axis argument.
        outputs: rule of each output.
        mutates: arguments written in place.
        grad: arguments that may carry a gradient.
        batch_axes: axes that selection must not look at.
    """
    parameters = list(signature.parameters)
    if unknown := [n for n in inputs if n not in parameters]:
        raise ContractError(f"{name}: rules for {unknown}, needs names among the parameters {parameters}")
    writer = _Writer()
    tensors = {p: r for p, r in inputs.items() if isinstance(r, TensorRule)}
    _write_types(writer, tensors, mutates)
    _write_axes(writer, inputs)
    axes = tuple(writer.known)
    static = tuple(a for a in axes if a not in batch_axes)
    options = tuple(p for p in parameters if p not in inputs and _is_option(signature.parameters[p]))
    weights = [p for p, r in tensors.items() if r.is_weight]
    key = ", ".join(
        ["_device.type", "_a", *static, *options]
        + [f"'plain/plain' if isinstance({w}, Tensor) else {w}.tag" for w in weights]
    )
    watched = [(p, r) for p, r in tensors.items() if r.word in ("a", "f32", "any", "W") or r.is_cache]
    needs_grad = " or ".join(f"{p} is not None and {p}.requires_grad" if r.optional else f"{p}.requires_grad" for p, r in watched)
    writer.add(f"_grad = grad_enabled() and ({needs_grad or False})")
    if mutates:
        writer.add("if _grad:", f"    raise errors.inference_only(OP, {mutates!r})")
    elif not grad:
        writer.add("_grad = False")
    writer.add(
        f"return Bound(({_tuple(parameters)}), ({_tuple(axes)}), ({key},), _device, _a, _acc, _view or _grad)",
    )
    source = "\n".join(
        [f"def bind({_signature(signature)}):", *writer.lines, "", *_alloc_source(outputs, axes, parameters), ""]
        + [*_flatten_source(signature, weights), "", *_unflatten_source(parameters, weights)]
    )
    defaults = {f"_default_{p}": q.default for p, q in signature.parameters.items() if q.default is not q.empty}
    namespace = {
        **CONTRACT_NAMESPACE, **defaults, "OP": name, "errors": errors, "Bound": Bound, "Weight": Weight,
        "cache_shape": cache_shape, "page_size_of": page_size_of, "is_byte_format": is_byte_format,
        "from_parts": from_parts,
    }  # fmt: skip
    exec(compile(source, f"<contract of {name}>", "exec"), namespace)
    functions = (namespace[f] for f in ("bind", "alloc", "flatten", "unflatten"))
    return Contract(*functions, axes, static, options, source)  # type: ignore[arg-type]


def _is_option(parameter: inspect.Parameter) -> bool:
    """Strings, switches and dtypes steer selection; plain numbers never do."""
    return any(word in str(parameter.annotation) for word in ("str", "bool", "dtype"))


def _tuple(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names) + ("," if names else "")


def _signature(signature: inspect.Signature) -> str:
    return ", ".join(p if q.default is q.empty else f"{p}=_default_{p}" for p, q in signature.parameters.items())


def _write_types(writer: _Writer, tensors: Mapping[str, TensorRule], mutates: tuple[str, ...]) -> None:
    """Types, ranks, dtypes, devices and strides of every tensor argument."""
    has_activation = any(r.word == "a" or r.is_cache for r in tensors.values())
    writer.add("_view = False", "_device = _a = None", "_acc = f32")
    for p, rule in sorted(tensors.items(), key=lambda item: item[1].word != "a"):  # `a` binds before words that follow it
        body = _Writer()
        if rule.is_weight:
            body.add(f"if not isinstance({p}, (Tensor, Weight)):", f"    raise errors.type(OP, {p!r}, {p}, 'a tensor or a Weight')")
            body.add(f"if isinstance({p}, Tensor):", f"    if {p}.dtype is not _a:", f"        raise errors.dtype(OP, {p!r}, {p}.dtype, _a)")
            body.add(f"    if type({p}) not in ORDINARY:", "        _view = True")
            body.add(f"    elif not {p}.is_contiguous():", f"        {p} = {p}.contiguous()")
        else:
            body.add(f"if type({p}) not in ORDINARY:", f"    if not isinstance({p}, Tensor):", f"        raise errors.type(OP, {p!r}, {p}, 'a tensor')", "    _view = True")
            body.add(*_dtype_lines(p, rule, has_activation))
            if p in mutates:
                body.add(f"if not {p}.is_contiguous():", f"    raise errors.strides(OP, {p!r}, {p})")
            else:
                body.add(f"if not {p}.is_contiguous():", f"    {p} = {p}.contiguous()")
        body.add("if _device is None:", f"    _device = {p}.device", f"elif {p}.device != _device:", f"    raise errors.device(OP, {p!r}, {p}.device, _device)")
        if not rule.is_cache:
            body.add(f"if len({p}.shape) != {len(rule.dims)}:", f"    raise errors.rank(OP, {p!r}, {p}.shape, {str(rule)!r})")
        _splice(writer, body, p, rule)


def _splice(writer: _Writer, body: _Writer, argument: str, rule: TensorRule) -> None:
    if rule.optional:
        writer.add(f"if {argument} is not None:", *body.lines)
    else:
        writer.lines += body.lines


def _dtype_lines(p: str, rule: TensorRule, has_activation: bool) -> list[str]:
    if rule.word == "a":
        return [
            "if _a is None:",
            f"    _a = {p}.dtype",
            "    if _a not in ACTIVATIONS:",
            f"        raise errors.activation(OP, {p!r}, _a)",
            "    if _a is f64:",
            "        _acc = f64",
            f"elif {p}.dtype is not _a:",
            f"    raise errors.dtype(OP, {p!r}, {p}.dtype, _a)",
        ]
    if rule.word == "any":
        return [f"if {p}.dtype not in ACTIVATIONS:", f"    raise errors.activation(OP, {p!r}, {p}.dtype)"]
    if rule.is_cache:
        want = "u8 if is_byte_format(format) else _a"
        return [f"if {p}.dtype is not ({want}):", f"    raise errors.dtype(OP, {p!r}, {p}.dtype, {want})"]
    if rule.word == "f32":
        # Without an activation the first f32 argument says whether this is the float64 form of the call.
        widen = "True" if not has_activation else "_a is f64"
        first = [] if has_activation else [f"if _a is None and {p}.dtype is f64:", "    _acc = f64"]
        seen = [] if has_activation else ["_a = _acc"]
        return [
            *first,
            f"if {p}.dtype is not _acc and not ({p}.dtype is f32 and {widen} and _acc is f64):",
            f"    raise errors.dtype(OP, {p!r}, {p}.dtype, _acc)",
            *seen,
        ]
    return [f"if {p}.dtype is not {rule.word}:", f"    raise errors.dtype(OP, {p!r}, {p}.dtype, {rule.word})"]


def _write_axes(writer: _Writer, inputs: Rules) -> None:
    """Bind bare axes first, then solve and check sums, products and caches, in as many passes as that needs."""
    pending: list[tuple[str, TensorRule, int]] = []
    for p, rule in inputs.items():
        if isinstance(rule, AxisRule):
            writer.add(f"if type({p}) is not int and not hasattr({p}, '__index__') or {p} < 0:", f"    raise errors.type(OP, {p!r}, {p}, 'a size >= 0')")
            writer.learn(rule.axis, p, p)
            continue
        if rule.is_cache:
            continue
        required = not rule.optional
        for i, dim in enumerate(rule.dims):
            if dim.is_name and required:
                writer.learn(dim.text, f"{p}.shape[{i}]", p)
            else:
                pending.append((p, rule, i))
    caches = [(p, r) for p, r in inputs.items() if isinstance(r, TensorRule) and r.is_cache]
    while pending or caches:
        before = len(pending) + len(caches)
        pending = [item for item in pending if not _write_compound(writer, *item)]
        caches = [item for item in caches if not _write_cache(writer, *item)]
        if len(pending) + len(caches) == before:
            left = [f"{p}: {r}" for p, r, _ in pending] + [f"{p}: {r}" for p, r in caches]
            raise ContractError(f"shape rules {left}: leave axes unknown, need one more argument that names them")


def _write_compound(writer: _Writer, p: str, rule: TensorRule, i: int) -> bool:
    if not rule.optional:
        return writer.dim(rule.dims[i], f"{p}.shape[{i}]", p)
    if any(n not in writer.known for n in rule.dims[i].names()):
        return False
    body = _Writer()
    body.known = writer.known
    body.dim(rule.dims[i], f"{p}.shape[{i}]", p)
    writer.add(f"if {p} is not None:", *body.lines)
    return True


def _write_cache(writer: _Writer, p: str, rule: TensorRule) -> bool:
    pages, size, *row = rule.dims
    row_names = [d.text for d in row]
    if any(n not in writer.known for n in row_names):
        return False
    parts = ", ".join(row_names)
    writer.add(f"_pages = {p}.shape[0] if len({p}.shape) else 0")
    writer.add(f"_page = page_size_of({rule.word!r}, format, {p}.shape, {parts})")
    writer.add(
        f"_want = cache_shape({rule.word!r}, format, _pages, _page, {parts})",
        f"if tuple({p}.shape) != _want:",
        f"    raise errors.cache(OP, {p!r}, {p}.shape, _want, format)",
    )
    writer.learn(pages.text, "_pages", p)
    writer.learn(size.text, "_page", p)
    return True


def _alloc_source(outputs: Mapping[str, TensorRule], axes: tuple[str, ...], parameters: list[str]) -> list[str]:
    lines = ["def alloc(bound):", f"    ({_tuple(axes)}) = bound.axes" if axes else "    pass"]
    made = []
    for rule in outputs.values():
        dtype = {"a": "bound.activation", "f32": "bound.accumulator"}.get(rule.word, rule.word)
        if rule.word in parameters:
            dtype = f"bound.args[{parameters.index(rule.word)}] or bound.activation"
        shape = _tuple([python(d) for d in rule.dims])
        made.append(f"empty(({shape}), dtype={dtype}, device=bound.device)")
    return [*lines, f"    return ({_tuple(made)})"]


def _flatten_source(signature: inspect.Signature, weights: list[str]) -> list[str]:
    lines = [f"def flatten({_signature(signature)}):"]
    flat = []
    for p in signature.parameters:
        if p in weights:
            lines += [
                f"    if isinstance({p}, Weight):",
                f"        _{p} = list({p}.tensors), {p}.tag, list({p}.shape)",
                "    else:",
                f"        _{p} = [{p}], 'plain/plain', list({p}.shape)",
            ]
            flat.append(f"*_{p}")
        else:
            flat.append(p)
    return [*lines, f"    return ({_tuple(flat)})"]


def _unflatten_source(parameters: list[str], weights: list[str]) -> list[str]:
    flat, back = [], []
    for p in parameters:
        if p in weights:
            flat += [f"{p}_data", f"{p}_tag", f"{p}_shape"]
            back.append(f"from_parts({p}_data, {p}_tag, {p}_shape)")
        else:
            flat.append(p)
            back.append(p)
    return [f"def unflatten({', '.join(flat)}):", f"    return ({_tuple(back)})"]
