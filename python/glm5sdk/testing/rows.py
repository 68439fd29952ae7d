"""Rows do not know their batch: the same rows gathered, split or alone must give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.registry import Op
from glm5sdk.registry.shapes import AxisRule, TensorRule
from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import clone
from glm5sdk.testing.tolerance import same_bits

__all__ = ["check_rows"]

Call = Callable[[Mapping[str, Any]], dict[str, Tensor]]
LARGER_BATCHES = (17, 67, 5, 130)
LARGE = 1 << 20  # elements beyond which a batch is not enlarged


def check_rows(op: Op[..., Any], values: Mapping[str, Any], plain: Mapping[str, Tensor], call: Call, seed: int) -> None:
    """Run permuted, enlarged, split and single-row batches.

    Args:
        op: the op.
        values: its arguments, not yet written to.
        plain: results of the whole batch, by name.
        call: runs the implementation on arguments of its own.
        seed: of the permutation and the cut.

    Raises:
        CheckFailed: `rows`.
    """
    axis = op.rows
    if axis is None:
        return
    count = dict(zip(op.contract.axes, op.contract.bind(*values.values()).axes, strict=True))[axis]
    if count == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    cut = int(torch.randint(count + 1, (), generator=generator))
    if op.mutates:
        _compare(op, "permuted", call(take(op, values, order)), plain, order)
        first = call(take(op, values, torch.arange(cut)))
        rest = {**clone(values), **{name: first[name] for name in op.mutates}}
        second = call(take(op, rest, torch.arange(cut, count)))
        places = {n: place for n in op.outputs if (place := _place(op, n)) is not None}
        joined = {n: torch.cat([first[n], second[n]], place) for n, place in places.items()}
        _compare(op, f"split at {cut}", {**joined, **{n: second[n] for n in op.mutates}}, plain, torch.arange(count))
        return
    size = sum(v.numel() for v in values.values() if isinstance(v, Tensor))
    extra = min(LARGER_BATCHES[seed % len(LARGER_BATCHES)], LARGE * count // max(size, 1))
    gathered = torch.cat([torch.randint(count, (extra,), generator=generator), order])
    _compare(op, f"gathered into {len(gathered)}", call(take(op, values, gathered)), plain, gathered)
    if count > 1:
        alone = order[:1]
        _compare(op, "alone", call(take(op, values, alone)), plain, alone)
        some = torch.arange(cut, min(cut + 1 + count // 2, count))
        _compare(op, f"sliced from {cut}", call(take(op, values, some)), plain, some)


def take(op: Op[..., Any], values: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The arguments of some rows, in that order, in storage of their own."""
    taken = clone(values)
    for name, rule in op.inputs.items():
        if isinstance(rule, AxisRule):
            if rule.axis == op.rows:
                taken[name] = len(rows)
            continue
        place = _place_of(rule, op.rows)
        if place is not None and isinstance(taken[name], Tensor):
            taken[name] = taken[name].index_select(place, rows.to(taken[name].device))
    return taken


def _place_of(rule: TensorRule, axis: str | None) -> int | None:
    return next((i for i, d in enumerate(rule.dims) if d.is_name and d.text == axis), None)


def _place(op: Op[..., Any], name: str) -> int | None:
    rule = op.outputs[name]
    return _place_of(rule, op.rows)


def _compare(op: Op[..., Any], how: str, got: Mapping[str, Tensor], plain: Mapping[str, Tensor], rows: Tensor) -> None:
    for name in op.outputs:
        place = _place(op, name)
        if place is None:
            continue
        want = plain[name].index_select(place, rows.to(plain[name].device))
        if not same_bits(got[name], want):
            differ = (got[name] != want).movedim(place, 0).flatten(1).any(1).nonzero() if want.shape[place] else rows
            raise CheckFailed(
                "rows", f"{name}: {how}: {len(differ)} of {len(rows)} rows have other bits than in the whole batch"
            )
    for name in op.mutates:
        if not same_bits(got[name], plain[name]):
            raise CheckFailed("rows", f"{name}: {how}: the cache has other bits than after the whole batch")
