"""Inputs of one example: axes from geometries or hypothesis, values from a seeded generator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._weights import KINDS, quantize_weight
from glm5sdk.registry import CATALOGUE, Impl, Op, TestRules, Weight
from glm5sdk.registry.contract_source import names_in
from glm5sdk.registry.device import ACTIVATIONS, dtype_name, named_dtype
from glm5sdk.registry.formats import cache_shape
from glm5sdk.registry.shapes import AxisRule, TensorRule
from glm5sdk.registry.spec import BATCH_AXES

__all__ = [
    "Example",
    "arguments",
    "as_device",
    "clone",
    "dtypes_of",
    "forward_of",
    "geometries",
    "kinds_of",
    "random_examples",
    "rules_of",
    "tensors_of",
    "widen",
]

DEFAULT_RANGE = (1, 9)
LARGER_SIZES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Example:
    """Everything that `arguments` needs to draw the same tensors again.

    Attributes:
        index: which option setting, dtype and exactness it uses; geometries count from 0.
        axes: sizes by axis name.
        dtype: short name of the activation dtype.
        exact: whether values are small integers.
        seed: of the generator.
        kind: of its weights.
    """

    index: int
    axes: tuple[tuple[str, int], ...]
    dtype: str
    exact: bool = False
    seed: int = 0
    kind: str = "plain"

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.axes)
        kind = f" {self.kind}" if self.kind != "plain" else ""
        return f"{self.dtype} {sizes} index={self.index} seed={self.seed}{' exact' if self.exact else ''}{kind}"


def forward_of(op: Op[..., Any]) -> Op[..., Any] | None:
    """The op whose gradient this one is, None for forward ops."""
    forward = CATALOGUE.get(op.name.removesuffix("_bwd"))
    return forward if forward is not None and forward.backward is op else None


def rules_of(op: Op[..., Any]) -> TestRules:
    """An op's test rules; a derived gradient op is tested on its forward's inputs."""
    return (forward_of(op) or op).tests


def dtypes_of(op: Op[..., Any], impl: Impl) -> list[str]:
    """Activation dtypes to test: f32 and bf16, and f16 where the implementation claims it."""
    if not any(isinstance(r, TensorRule) and (r.word == "a" or r.is_cache) for r in op.inputs.values()):
        return ["f32"]
    claimed = impl.requires.dtypes
    wanted: list[str] = [d for d in ("f32", "bf16", "f16") if d in claimed] if claimed else ["f32", "bf16"]
    return wanted or list(claimed)


def kinds_of(op: Op[..., Any], impl: Impl) -> list[str]:
    """Kinds of weights to test: those in their plain layout that the implementation accepts, `plain` first.

    A gradient op is tested on plain weights only: autograd, its oracle, sees no others.
    """
    if forward_of(op) is not None or not any(isinstance(r, TensorRule) and r.is_weight for r in op.inputs.values()):
        return ["plain"]
    accepted = impl.requires.weights
    if not accepted:
        return ["plain"] if impl.kind == "native" else list(KINDS)
    return [kind for kind in KINDS if f"{kind}/plain" in accepted]


def geometries(op: Op[..., Any], impl: Impl, every_dtype: bool = False) -> list[Example]:
    """The fixed examples of an op, each in one dtype or in every one, with weights of one more kind where it can."""
    dtypes = dtypes_of(op, impl)
    _, *more = kinds_of(op, impl)
    found = []
    for index, sizes in enumerate(rules_of(op).geometries):
        axes = tuple((a, sizes.get(a, _range(op, a)[0] or 1)) for a in _axes(op))
        first = _example(op, index, axes, dtypes)
        found.append(first)
        if more:
            found.append(replace(first, exact=False, kind=more[index % len(more)]))
        if every_dtype:
            found += [Example(index, axes, d, first.exact, index) for d in dtypes if d != first.dtype]
            found += [Example(index, axes, d, False, index, kind) for d in dtypes for kind in more]
    return found


def random_examples(op: Op[..., Any], impl: Impl) -> st.SearchStrategy[Example]:
    """Random examples whose sizes an implementation accepts, as far as sizes alone decide that."""
    rules = rules_of(op)
    dtypes = dtypes_of(op, impl)
    count = len(rules.options) * len(dtypes) * 2
    sizes = {axis: _sizes(op, impl, axis) for axis in _axes(op)}

    def build(index: int, seed: int, drawn: Mapping[str, int], kind: str) -> Example:
        example = _example(op, index, tuple(drawn.items()), dtypes, seed)
        return example if kind == "plain" else replace(example, exact=False, kind=kind)

    drawn = st.fixed_dictionaries(sizes).filter(lambda axes: all(_holds(c, axes) for c in op.where))
    kinds = st.sampled_from(kinds_of(op, impl))
    return st.builds(build, st.integers(0, count - 1), st.integers(0, 2**31 - 1), drawn, kinds)


def _holds(condition: str, axes: Mapping[str, int]) -> bool:
    """Whether sizes satisfy a condition of the declaration, e.g. `R % 2 == 0`; one that names more is not theirs."""
    if not names_in(condition) <= set(axes):
        return True
    return bool(eval(condition, {}, dict(axes)))  # noqa: S307  the op's own code, checked when it was declared


def _example(
    op: Op[..., Any], index: int, axes: tuple[tuple[str, int], ...], dtypes: list[str], seed: int | None = None
) -> Example:
    # Options advance with the index; the extra step makes every option meet every dtype and both kinds of values.
    dtype = dtypes[(index + index // len(dtypes)) % len(dtypes)]
    exact = bool(rules_of(op).exact_outputs) and forward_of(op) is None and index % 2 == 1
    return Example(index, axes, dtype, exact, index if seed is None else seed)


def _axes(op: Op[..., Any]) -> tuple[str, ...]:
    return (forward_of(op) or op).contract.axes


def _range(op: Op[..., Any], axis: str) -> tuple[int, int]:
    low, high = DEFAULT_RANGE
    return rules_of(op).ranges.get(axis, (0 if axis == (forward_of(op) or op).rows else low, high))


def _sizes(op: Op[..., Any], impl: Impl, axis: str) -> st.SearchStrategy[int]:
    low, high = _range(op, axis)
    test = impl.requires.axes.get(axis)
    if test is None or axis in BATCH_AXES:
        return st.integers(low, high)
    accepted = [n for n in (*range(low, high + 1), *LARGER_SIZES) if test.accepts(n)]
    if not accepted:
        raise ContractError(f"{op.name}: axis {axis} of {impl.name} accepts no size up to 512, needs one to be tested")
    return st.sampled_from(accepted)


def arguments(op: Op[..., Any], example: Example, device: str = "cpu") -> dict[str, Any]:
    """Draw one example's arguments, in the order of the signature.

    Args:
        op: the op; for a derived gradient op the forward's inputs and a gradient for each float output.
        example: what to draw.
        device: where the tensors end up; they are drawn on the CPU, so that values do not depend on it.

    Raises:
        ContractError: an argument has no default and the test rules give it no value.
    """
    forward = forward_of(op)
    generator = torch.Generator().manual_seed(example.seed)
    drawn = _forward_arguments(forward or op, example, generator)
    if forward is not None:
        drawn = {**_output_gradients(op, forward, drawn, generator), **drawn}
    return as_device(drawn, device)


def _forward_arguments(op: Op[..., Any], example: Example, generator: torch.Generator) -> dict[str, Any]:
    rules, axes, dtype = op.tests, dict(example.axes), named_dtype(example.dtype)
    given = dict(rules.make_inputs(axes, dtype, generator, example.exact)) if rules.make_inputs else {}
    option = rules.options[example.index % len(rules.options)]
    given |= option
    named = {name for setting in rules.options for name in setting}
    values: dict[str, Any] = {}
    for position, (name, parameter) in enumerate(op.signature.parameters.items()):
        rule = op.inputs.get(name)
        if name in given:
            values[name] = given[name]
        elif isinstance(rule, AxisRule):
            values[name] = axes[rule.axis]
        elif isinstance(rule, TensorRule):
            absent = rule.optional and name not in named and (example.index >> position % 3) % 2 == 1
            values[name] = None if absent else _draw(op, name, rule, axes, dtype, generator, example.exact, given)
            if rule.is_weight and values[name] is not None and example.kind != "plain":
                values[name] = quantize_weight(values[name], example.kind)
        elif parameter.default is not parameter.empty:
            values[name] = parameter.default
        else:
            raise ContractError(
                f"{op.name}: {name} has no default, needs a value from TestRules.options or make_inputs"
            )
    return values


def _draw(
    op: Op[..., Any], name: str, rule: TensorRule, axes: Mapping[str, int], dtype: torch.dtype,
    generator: torch.Generator, exact: bool, given: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Standard normal values, small integers when exact; weights are scaled so that products stay near 1."""
    if rule.is_cache:
        pages, size, *row = (d.evaluate(axes) for d in rule.dims)
        shape = cache_shape(rule.word, given.get("format", "plain"), pages, size, *row)
    else:
        shape = tuple(d.evaluate(axes) for d in rule.dims)
    if rule.word == "f32":
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    elif rule.word not in ("a", "W", "any") and not (rule.is_cache and given.get("format", "plain") == "plain"):
        raise ContractError(f"{op.name}: {name} is {rule}, needs values from TestRules.make_inputs")
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator)
    return (values * max(shape[-1], 1) ** -0.5 if rule.is_weight else values).to(dtype)


def _output_gradients(
    op: Op[..., Any], forward: Op[..., Any], drawn: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    bound = forward.contract.bind(*drawn.values())
    outs = forward.contract.alloc(bound)
    return {
        name: torch.randn(out.shape, generator=generator).to(out.dtype)
        for name, out in zip((f"grad_{o}" for o in forward.outputs), outs, strict=True)
        if name in op.inputs
    }


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor among the arguments, a Weight's as `name.0`, `name.1`."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, Weight):
            found |= {f"{name}.{i}": t for i, t in enumerate(value.tensors)}
    return found


def _map(values: Mapping[str, Any], change: Any) -> dict[str, Any]:
    return {
        name: change(v) if isinstance(v, Tensor) else v.map(change) if isinstance(v, Weight) else v
        for name, v in values.items()
    }


def clone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in storage of their own."""
    return _map(values, lambda t: t.clone())


def as_device(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Arguments on a device."""
    return dict(values) if device == "cpu" else _map(values, lambda t: t.to(device))


def widen(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values in float64, float dtypes among the options too; integers, bytes and quantised weights stay."""
    wide: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1:
            wide[name] = value.double()
        elif isinstance(value, torch.dtype) and value in ACTIVATIONS:
            wide[name] = torch.float64
        else:
            wide[name] = value.clone() if isinstance(value, Tensor) else value
    return wide


def describe(values: Iterable[Tensor]) -> str:
    """Dtypes and shapes, for messages."""
    return ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in values)
