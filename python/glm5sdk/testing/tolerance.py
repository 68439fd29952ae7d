"""The one rule of right and wrong: error against float64 <= k x the reference's own in the same dtype + a floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import read_index_rows, read_kv_rows
from glm5sdk.registry import Op, TestRules, Weight
from glm5sdk.registry.device import dtype_name
from glm5sdk.registry.formats import is_byte_format, page_size_of
from glm5sdk.registry.shapes import TensorRule
from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import rules_of
from glm5sdk.testing.oracle import Oracle

__all__ = ["Tolerance", "compare_results", "same_bits"]

FP8_SPACING = 0.08  # largest distance of neighbouring e4m3 values, as a share of a group's largest value
INT8_SPACING = 1 / 127


class Tolerance(float):
    """Allowed absolute error: the largest over the float results, each one's own by name in `of`."""

    of: dict[str, float]

    def __new__(cls, by_name: Mapping[str, float]) -> Tolerance:
        made = super().__new__(cls, max(by_name.values(), default=16 * torch.finfo(torch.float32).eps))
        made.of = dict(by_name)
        return made


def compare_results(op: Op[..., Any], oracle: Oracle, got: Mapping[str, Tensor], exact: bool) -> None:
    """Compare outputs and mutated arguments of one call with the oracle.

    Raises:
        CheckFailed: `right` for values, `exact` where bits are promised, `slots` for a cache changed where it must not.
    """
    rules = rules_of(op)
    wide, same, results = dict(oracle.wide), dict(oracle.same), {k: v.cpu() for k, v in got.items()}
    for name in op.mutates:
        _untouched(op, name, oracle.arguments, results[name])
        rows = _byte_rows(op, name, oracle.arguments)
        if rows is None:
            continue
        if not op.outputs and not same_bits(results[name], same[name]):
            raise CheckFailed(
                "exact", f"{name}: bytes differ, needs the reference's: an op that only writes has one answer"
            )
        wide[name], same[name], results[name] = rows(wide[name]), rows(same[name]), rows(results[name])
    tolerance = Tolerance(
        {
            n: _allowed(rules, _spacing(op, n, oracle.arguments, same[n]), results[n], same[n], wide[n])
            for n in wide
            if _continuous(wide[n])
        }
    )
    if rules.compare is not None and rules is op.tests:
        try:
            rules.compare(
                oracle.arguments, tuple(results[n] for n in op.outputs), tuple(wide[n] for n in op.outputs), tolerance
            )
        except AssertionError as error:
            raise CheckFailed("right", str(error)) from error
    for name, want in wide.items():
        promised = exact and name in rules.exact_outputs
        if promised and not same_bits(results[name], same[name]):
            raise CheckFailed("exact", f"{name}: {_first_difference(results[name], same[name])} on exact inputs")
        if rules.compare is not None and rules is op.tests and name in op.outputs:
            continue
        if _continuous(want):
            _close(name, results[name], same[name], want, tolerance.of[name], rules.factor)
        elif (exact or name not in rules.exact_outputs) and not same_bits(results[name], same[name]):
            raise CheckFailed("right", f"{name}: {_first_difference(results[name], same[name])}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; NaN equals the same NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def _continuous(t: Tensor) -> bool:
    """Whether a tensor holds values rather than codes: integers and float8 are right or wrong."""
    return t.is_floating_point() and t.element_size() > 1


def as_bytes(t: Tensor) -> Tensor:
    """All bytes of a tensor [n]; copied, since even a contiguous tensor of one element may have a stride of two."""
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _spacing(op: Op[..., Any], name: str, arguments: Mapping[str, Any], same: Tensor) -> float:
    """What one step of a quantised value that rounds the other way may change, as a share of the largest result.

    A single product quantises what it is given, the same in every implementation; a second one what the first computed.
    """
    if name in op.mutates:
        return FP8_SPACING if same.dtype == torch.float64 else 0.0
    kinds = {value.kind for value in arguments.values() if isinstance(value, Weight)}
    if sum(isinstance(r, TensorRule) and r.is_weight for r in op.inputs.values()) < 2 or not kinds:
        return 0.0
    return FP8_SPACING if "fp8" in kinds else INT8_SPACING


def _allowed(rules: TestRules, spacing: float, got: Tensor, same: Tensor, wide: Tensor) -> float:
    finite = wide[wide.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    floor = rules.floor.get(dtype_name(same.dtype))
    if floor is None:
        accumulator = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
        # One rounding more or less of the result, and eight of the accumulator near 1.
        floor = torch.finfo(same.dtype).eps * scale + 8 * accumulator * max(1.0, scale)
    floor += spacing * scale
    return rules.factor * _error(same, wide) + floor


def _error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference where the right answer is finite."""
    difference = (got.double() - want).abs()[want.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def _close(name: str, got: Tensor, same: Tensor, want: Tensor, allowed: float, factor: float) -> None:
    if got.shape != want.shape or got.dtype != same.dtype:
        raise CheckFailed("right", f"{name} is {got.dtype} {tuple(got.shape)}, needs {same.dtype} {tuple(want.shape)}")
    special = ~want.isfinite()
    wrong = special & ~((got.double() == want) | (got.double().isnan() & want.isnan()))
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise CheckFailed("right", f"{name}{place} is {got[tuple(place)].item()}, needs {want[tuple(place)].item()}")
    difference = (got.double() - want).abs().masked_fill(special, 0)
    bad = ~(difference <= allowed)
    if bool(bad.any()):
        worst = torch.where(difference.isnan(), torch.inf, difference)
        place = [int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)]
        raise CheckFailed(
            "right",
            f"{name}{place} is {got[tuple(place)].item():.9g}, needs {want[tuple(place)].item():.9g}: the error is "
            f"{difference[tuple(place)].item():.3g}, needs <= {allowed:.3g} = {factor:g} x the reference's "
            f"{_error(same, want):.3g} + a floor",
        )


def _first_difference(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, needs {want.dtype} {tuple(want.shape)}"
    places = (got != want).nonzero()
    if not len(places):
        return "the sign of a zero or a NaN's payload differs, needs the same bits"
    place = places[0].tolist()
    return f"{place} is {got[tuple(place)].item()}, needs {want[tuple(place)].item()}"


def _untouched(op: Op[..., Any], name: str, arguments: Mapping[str, Any], got: Tensor) -> None:
    """Rows that no slot names must keep their bytes."""
    before = _raw_rows(op, name, arguments, arguments[name])
    slots = arguments["slots"]
    kept = torch.ones(len(before), dtype=torch.bool)
    kept[slots[slots >= 0]] = False
    changed = kept & (before != _raw_rows(op, name, arguments, got)).any(-1)
    if bool(changed.any()):
        raise CheckFailed("slots", f"{name}: slot {int(changed.nonzero()[0])} was written, needs to stay as it was")


def _raw_rows(op: Op[..., Any], name: str, arguments: Mapping[str, Any], cache: Tensor) -> Tensor:
    """A cache as bytes [P * S, bytes of a row]."""
    raw = as_bytes(cache).view(*cache.shape[:-1], cache.shape[-1] * cache.element_size())
    if raw.dim() == 3:
        return raw.flatten(0, 1)
    dim = _row_parts(op, name, arguments)[0]
    size = raw.shape[1] // (dim + 4)
    codes, scales = raw[:, : size * dim], raw[:, size * dim :]
    return torch.cat([codes.reshape(-1, dim), scales.reshape(-1, 4)], dim=1)


def _row_parts(op: Op[..., Any], name: str, arguments: Mapping[str, Any]) -> list[int]:
    rule = op.inputs[name]
    bound = op.contract.bind(*arguments.values())
    axes = dict(zip(op.contract.axes, bound.axes, strict=True))
    return [d.evaluate(axes) for d in rule.dims[2:]] if isinstance(rule, TensorRule) else []


def _byte_rows(op: Op[..., Any], name: str, arguments: Mapping[str, Any]) -> Any:
    """A function from a byte cache to the rows it stands for; None for caches in the activation dtype."""
    rule = op.inputs[name]
    format = arguments.get("format", "plain")
    if not isinstance(rule, TensorRule) or not rule.is_cache or not is_byte_format(format):
        return None
    row = _row_parts(op, name, arguments)
    shape = tuple(arguments[name].shape)
    slots = torch.arange(shape[0] * page_size_of(rule.word, format, shape, *row))
    if rule.word == "kv_cache":
        return lambda cache: read_kv_rows(cache, slots, row[0], format, torch.float64)
    return lambda cache: read_index_rows(cache, slots, row[0], format, torch.float64)
