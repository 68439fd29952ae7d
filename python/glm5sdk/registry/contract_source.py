"""Writes the Python source of a contract: one function per idea, each returning or adding lines."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.shapes import AxisRule, Dim, TensorRule

__all__ = [
    "DTYPE_NAMES",
    "BindWriter",
    "Rules",
    "alloc_source",
    "condition_lines",
    "flatten_source",
    "names_in",
    "parameter_list",
    "tuple_of",
    "unflatten_source",
]

# What conditions may compare a dtype argument with; _acc is f64 for f64, else f32.
DTYPE_NAMES = ("f32", "f64", "_acc")
Rules = Mapping[str, TensorRule | AxisRule]


def python(dim: Dim) -> str:
    """The dimension as a Python expression over axis names."""
    return " + ".join("*".join(([str(f)] if f != 1 or not names else []) + _factors(names)) for f, names in dim.terms)


def _factors(names: Sequence[str]) -> list[str]:
    """Each axis as it stands, each `axis/part` as its quotient rounded up."""
    return [f"(-(-{n.replace('/', ' // ')}))" if "/" in n else n for n in names]


def tuple_of(items: Sequence[str]) -> str:
    """A tuple display, right for zero and one item too."""
    return f"({', '.join(items)}{',' if items else ''})"


def parameter_list(signature: inspect.Signature) -> str:
    """The parameters as written in a `def`, defaults by name."""
    return ", ".join(p if q.default is q.empty else f"{p}=_default_{p}" for p, q in signature.parameters.items())


def _indent(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def _check(condition: str, error: str) -> list[str]:
    return [f"if {condition}:", f"    raise errors.{error}"]


class BindWriter:
    """The body of `bind`, written in two passes: what each tensor is, then what their shapes say about the axes."""

    def __init__(self, inputs: Rules, mutates: tuple[str, ...]) -> None:
        self.lines: list[str] = []
        self.axes: list[str] = []
        self._inputs = inputs
        self._mutates = mutates
        self._tensors = {p: r for p, r in inputs.items() if isinstance(r, TensorRule)}
        self._types()
        self._shapes()

    # What each tensor is.

    def _types(self) -> None:
        self.lines += ["_view = False", "_device = _a = None", "_cpu = False", "_acc = f32"]
        # The activation's dtype is known before the words that follow it, weights last.
        ordered = sorted(self._tensors.items(), key=lambda item: (item[1].word != "a", item[1].is_weight))
        self._first = ordered[0][0] if ordered else ""
        known = False
        for p, rule in ordered:
            body = self._weight(p, known) if rule.is_weight else self._tensor(p, rule, known)
            self._guarded(p, rule, body)
            known = known or not rule.optional

    def _guarded(self, p: str, rule: TensorRule, body: list[str]) -> None:
        self.lines += [f"if {p} is not None:", *_indent(body)] if rule.optional else body

    def _tensor(self, p: str, rule: TensorRule, known: bool) -> list[str]:
        lines = [
            f"if type({p}) is not Tensor and type({p}) not in ORDINARY:",
            *_indent(_check(f"not isinstance({p}, Tensor)", f"type(OP, {p!r}, {p}, 'a tensor')")),
            "    _view = True",
            *self._dtype(p, rule),
        ]
        if p in self._mutates:
            lines += _check(f"not is_contiguous(OP, {p!r}, {p})", f"strides(OP, {p!r}, {p})")
        else:
            lines += self._plain(p, rule.word)
        return [*lines, *self._device(p, known), *self._rank(p, rule)]

    def _plain(self, p: str, word: str) -> list[str]:
        """Memory as it is read: dense, contiguous, and no lazy negation, which is a flag that kernels never see."""
        lines = [
            "try:",
            f"    if not {p}.is_contiguous():",
            f"        {p} = {p}.contiguous()",
            "except RuntimeError:",
            f"    raise errors.layout(OP, {p!r}, {p}) from None",
        ]
        if word in ("i32", "i64", "u8", "q8"):
            return lines
        return [*lines, f"if {p}.is_neg():", f"    {p} = {p}.resolve_neg()"]

    def _weight(self, p: str, known: bool) -> list[str]:
        tensor = [
            *_check(f"{p}.dtype is not _a", f"dtype(OP, {p!r}, {p}.dtype, _a)"),
            f"if type({p}) is not Tensor and type({p}) not in ORDINARY:",
            "    _view = True",
            "else:",
            *_indent(self._plain(p, "W")),
            *self._device(p, known),
        ]
        prepared = [
            f"if not all(type(_t) in ORDINARY for _t in {p}.tensors):",
            "    _view = True",
            *_check(f"_device is not None and {p}.device != _device", f"device(OP, {p!r}, {p}.device, _device)"),
        ]
        return [
            f"if isinstance({p}, Tensor):",
            *_indent(tensor),
            f"elif isinstance({p}, Weight):",
            *_indent(prepared),
            "else:",
            f"    raise errors.type(OP, {p!r}, {p}, 'a tensor or a Weight')",
            *self._rank(p, self._tensors[p]),
        ]

    def _device(self, p: str, known: bool) -> list[str]:
        learn = [f"_device = {p}.device", f"_cpu = {p}.is_cpu"]
        # Comparing two devices costs three times the flag.
        compare = _check(
            f"not {p}.is_cpu if _cpu else {p}.device != _device", f"device(OP, {p!r}, {p}.device, _device)"
        )
        if known:
            return compare
        if p == self._first:
            return learn
        return ["if _device is None:", *_indent(learn), "el" + compare[0], *compare[1:]]

    def _rank(self, p: str, rule: TensorRule) -> list[str]:
        if rule.is_cache:
            return []
        lines = [] if rule.optional else [f"_shape_{p} = {p}.shape"]
        shape = f"{p}.shape" if rule.optional else f"_shape_{p}"
        return lines + _check(f"len({shape}) != {len(rule.dims)}", f"rank(OP, {p!r}, {shape}, {str(rule)!r})")

    def _dtype(self, p: str, rule: TensorRule) -> list[str]:
        if rule.word == "a":
            return [
                "if _a is None:",
                f"    _a = {p}.dtype",
                *_indent(_check("_a not in ACTIVATIONS", f"activation(OP, {p!r}, _a)")),
                "    if _a is f64:",
                "        _acc = f64",
                *_check(f"{p}.dtype is not _a", f"dtype(OP, {p!r}, {p}.dtype, _a)"),
            ]
        if rule.word == "any":
            return _check(f"{p}.dtype not in ACTIVATIONS", f"activation(OP, {p!r}, {p}.dtype)")
        if rule.word == "q8":
            return _check(f"{p}.dtype not in QUANTISED", f"dtype(OP, {p!r}, {p}.dtype, 'int8 or float8_e4m3fn')")
        if rule.is_cache:
            want = "u8 if format in BYTE_FORMATS else _a"
            return _check(f"{p}.dtype is not ({want})", f"dtype(OP, {p!r}, {p}.dtype, {want})")
        if rule.word == "f32":
            return self._float32(p)
        return _check(f"{p}.dtype is not {rule.word}", f"dtype(OP, {p!r}, {p}.dtype, {rule.word})")

    def _float32(self, p: str) -> list[str]:
        """`f32` is float64 in a float64 call; float32 is accepted there too, since widening it is exact."""
        has_activation = any(r.word == "a" or r.is_cache for r in self._tensors.values())
        check = _check(
            f"{p}.dtype is not _acc and not ({p}.dtype is f32 and _acc is f64)", f"dtype(OP, {p!r}, {p}.dtype, _acc)"
        )
        if has_activation:
            return check
        # Without an activation the first f32 argument says whether this is the float64 form of the call.
        return [f"if _a is None and {p}.dtype is f64:", "    _acc = f64", *check, "_a = _acc"]

    # What the shapes say.

    def _shapes(self) -> None:
        """Bind bare axes first, then solve and check sums, products and caches, in as many passes as that needs."""
        pending: list[tuple[str, TensorRule, int]] = []
        for p, rule in self._inputs.items():
            if isinstance(rule, AxisRule):
                self.lines += [f"if type({p}) is not int or not 0 <= {p} < 2147483648:"]
                self.lines += [f"    {p} = as_size(OP, {p!r}, {p})"]
                self._learn(rule.axis, p, p)
            elif rule.optional and not rule.is_cache:
                pending += [(p, rule, i) for i in range(len(rule.dims))]
            elif not rule.is_cache:
                self._unpack(p, rule, pending)
        caches = [(p, r) for p, r in self._tensors.items() if r.is_cache]
        while pending or caches:
            before = len(pending) + len(caches)
            pending = [item for item in pending if not self._compound(*item)]
            caches = [item for item in caches if not self._cache(*item)]
            if len(pending) + len(caches) == before and not self._axis_of_optional(pending):
                left = [f"{p}: {r}" for p, r, _ in pending] + [f"{p}: {r}" for p, r in caches]
                raise ContractError(f"shape rules {left}: leave axes unknown, need one more argument that names them")

    def _axis_of_optional(self, pending: list[tuple[str, TensorRule, int]]) -> bool:
        """An axis that only an optional tensor names is 0 without it; bound last, so that others bind what they can."""
        for p, rule, i in pending:
            if rule.optional and rule.dims[i].is_name:
                self._learn(rule.dims[i].text, f"{p}.shape[{i}] if {p} is not None else 0", p)
                return True
        return False

    def _unpack(self, p: str, rule: TensorRule, pending: list[tuple[str, TensorRule, int]]) -> None:
        """Name every dimension at once: new axes by their names, the others for the checks that follow."""
        targets, checks = [], []
        for i, dim in enumerate(rule.dims):
            if dim.is_name and dim.text not in self.axes:
                self.axes.append(dim.text)
                targets.append(dim.text)
                continue
            size = f"_{p}_{i}"
            targets.append(size)
            if dim.is_name:
                checks += _axis_check(dim.text, p, size)
            else:
                pending.append((p, rule, i))
        if targets:
            self.lines += [f"{', '.join(targets)}, = _shape_{p}", *checks]

    def _learn(self, axis: str, expression: str, argument: str) -> None:
        """Bind an axis, or check it against what an earlier argument said."""
        if axis in self.axes:
            self.lines += _axis_check(axis, argument, expression)
        else:
            self.axes.append(axis)
            self.lines.append(f"{axis} = {expression}")

    def _compound(self, p: str, rule: TensorRule, i: int) -> bool:
        """Write the check of one dimension; False when it cannot be written yet."""
        dim, size = rule.dims[i], f"{p}.shape[{i}]" if rule.optional else f"_{p}_{i}"
        unknown = sorted({n for n in dim.names() if n not in self.axes})
        if len(unknown) > (0 if rule.optional else 1):
            return False
        if unknown:
            self._solve(dim, unknown[0], size, p)
        else:
            want = python(dim)
            self._guarded(p, rule, _check(f"{size} != {want}", f"dim(OP, {p!r}, {dim.text!r}, {size}, {want})"))
        return True

    def _solve(self, dim: Dim, unknown: str, size: str, p: str) -> None:
        numerator, divisor = dim.solve_for(unknown)
        self.lines.append(f"_rest = {numerator.replace('_size', size)}")
        if divisor == "1":
            self.lines.append(f"{unknown} = _rest")
            wrong = "_rest < 0"
        else:  # no divmod: sizes may be symbolic
            self.lines.append(f"{unknown} = _rest // ({divisor}) if ({divisor}) else 0")
            wrong = f"_rest < 0 or {unknown} * ({divisor}) != _rest"
        self.lines += _check(wrong, f"dim(OP, {p!r}, {dim.text!r}, {size})")
        self.axes.append(unknown)

    def _cache(self, p: str, rule: TensorRule) -> bool:
        pages, size, *row = rule.dims
        if any(n not in self.axes for d in row for n in d.names()):
            return False
        parts = ", ".join(python(d) for d in row)
        width = " + ".join(python(d) for d in row)
        general = [
            "_pages = _shape[0] if len(_shape) else 0",
            f"_page = page_size_of({rule.word!r}, format, _shape, {parts})",
            f"_want = cache_shape({rule.word!r}, format, _pages, _page, {parts})",
            *_check("tuple(_shape) != _want", f"cache(OP, {p!r}, _shape, _want, format)"),
        ]
        # The plain format without two calls; whatever does not fit it is explained by the general road.
        plain = f"format == 'plain' and len(_shape) == 3 and _shape[2] == {width}"
        self.lines += [f"_shape = {p}.shape", f"if {plain}:", "    _pages, _page, _ = _shape", "else:"]
        self.lines += _indent(general)
        self._learn(pages.text, "_pages", p)
        self._learn(size.text, "_page", p)
        return True


def _axis_check(axis: str, argument: str, got: str) -> list[str]:
    return _check(f"{axis} != {got}", f"axis(OP, {axis!r}, {axis}, {argument!r}, {got})")


def names_in(condition: str) -> set[str]:
    """What a condition speaks about."""
    return {n.id for n in ast.walk(ast.parse(condition, mode="eval")) if isinstance(n, ast.Name)}


def condition_lines(where: Sequence[str], known: Sequence[str]) -> list[str]:
    """Checks of what the shape language cannot say, e.g. `R % 2 == 0` or `stride >= 1`, over axes and scalars."""
    lines = []
    for condition in where:
        named = names_in(condition)
        if unknown := sorted(named - set(known)):
            raise ContractError(f"condition {condition!r}: names {unknown}, needs names among {', '.join(known)}")
        sizes = ", ".join(f"{a!r}: {a}" for a in known if a in named and a not in DTYPE_NAMES)
        lines += _check(f"not ({condition})", f"condition(OP, {condition!r}, {{{sizes}}})")
    return lines


def alloc_source(
    inputs: Rules, outputs: Mapping[str, TensorRule], axes: Sequence[str], parameters: Sequence[str]
) -> list[str]:
    """`alloc(bound)`: fresh outputs by the output rules."""
    lines = ["def alloc(bound):", "    _args, _axes, _, _device, _a, _acc, _ = bound"]
    lines += [f"    {tuple_of(axes)} = _axes"] if axes else []
    tensors = {p: r for p, r in inputs.items() if isinstance(r, TensorRule) and not r.optional and not r.is_weight}
    # `like.new_empty` finds its device, and its dtype where that is the same, faster than `empty` is told them.
    like = next((p for p, r in tensors.items() if r.word == "a"), next(iter(tensors), None))
    make, place = ("empty", ", device=_device") if like is None else ("_like.new_empty", "")
    lines += [] if like is None else [f"    _like = _args[{parameters.index(like)}]"]
    made = []
    for rule in outputs.values():
        dtype = {"a": "_a", "f32": "_acc"}.get(rule.word, rule.word)
        if rule.word in parameters:
            given = f"_args[{parameters.index(rule.word)}]"
            dtype = f"_acc if {given} is f32 else {given} or _a"  # f32 means f64 for f64
        same = like is not None and rule.word == "a" == tensors[like].word
        made.append(f"{make}({tuple_of([python(d) for d in rule.dims])}{'' if same else f', dtype={dtype}'}{place})")
    return [*lines, f"    return {tuple_of(made)}"]


def flatten_source(signature: inspect.Signature, weights: Sequence[str]) -> list[str]:
    """`flatten(*args, **kwargs)`: a weight becomes its tensors, its tag and its shape."""
    lines = [f"def flatten({parameter_list(signature)}):"]
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
    return [*lines, f"    return {tuple_of(flat)}"]


def unflatten_source(parameters: Sequence[str], weights: Sequence[str]) -> list[str]:
    """`unflatten(*flat)`: the inverse."""
    flat, back = [], []
    for p in parameters:
        if p in weights:
            flat += [f"{p}_data", f"{p}_tag", f"{p}_shape"]
            back.append(f"from_parts({p}_data, {p}_tag, {p}_shape)")
        else:
            flat.append(p)
            back.append(p)
    return [f"def unflatten({', '.join(flat)}):", f"    return {tuple_of(back)}"]
