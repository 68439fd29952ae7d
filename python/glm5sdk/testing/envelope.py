"""Outside its envelope an implementation must say why, in the error and in `explain`, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.registry.device import dtype_name
from glm5sdk.registry.shapes import TensorRule
from glm5sdk.testing.checks import PairChecks
from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import Example, arguments, as_device, geometries, rules_of, tensors_of
from glm5sdk.testing.tolerance import same_bits

__all__ = ["check_envelope"]


def check_envelope(checks: PairChecks) -> None:
    """Try dtypes, sizes and options that the row excludes, and one call that breaks the op's contract.

    Raises:
        CheckFailed: `envelope` or `contract`.
    """
    base = _base(checks)
    if base is None:
        return
    for example in _outside(checks, base):
        _refused(checks, example)
    _contract(checks, base)


def _base(checks: PairChecks) -> Example | None:
    fixed = [e for e in geometries(checks.op, checks.impl) if checks.covers(e)]
    return min(fixed, key=lambda e: sum(size for _, size in e.axes)) if fixed else None


def _outside(checks: PairChecks, base: Example) -> Iterator[Example]:
    requires, options = checks.impl.requires, rules_of(checks.op).options
    if requires.dtypes:
        for dtype in ("f32", "bf16", "f16", "f64"):
            if dtype not in requires.dtypes:
                yield Example(base.index, base.axes, dtype, base.exact, base.seed)
    for axis, test in requires.axes.items():
        size = next((n for n in (*range(1, 10), 4096, 65536) if not test.accepts(n)), None)
        if size is not None and size < 65536:
            axes = tuple((a, size if a == axis else n) for a, n in base.axes)
            yield Example(base.index, axes, base.dtype, base.exact, base.seed)
    for index, setting in enumerate(options):
        if any(name in setting and setting[name] not in values for name, values in requires.options.items()):
            yield Example(index, base.axes, base.dtype, base.exact, base.seed)


def _refused(checks: PairChecks, example: Example) -> None:
    op, impl = checks.op, checks.impl
    try:
        values = as_device(arguments(op, example), checks.device)
        info = op.call_info(op.contract.bind(*values.values()))
    except (ContractError, RuntimeError):
        return  # sizes that do not go together say nothing about the envelope
    if info.dtype != example.dtype:
        return  # no argument carries the dtype
    with checks.selected():
        explanation = op.explain(*values.values())
        reasons = dict(explanation.choice.rows)[impl]
        if not reasons:
            raise CheckFailed("envelope", f"{op.name} {impl.name}: gives no reason against {example}")
        if explanation.choice.impl is not None:
            return  # another variant of the same backend takes it
        try:
            with torch.no_grad():
                op(*values.values())
        except UnavailableError as error:
            if missing := [r for r in (impl.name, *reasons) if r not in str(error)]:
                raise CheckFailed("envelope", f"{op.name} {impl.name}: the refusal does not say {missing}") from error
            return
    raise CheckFailed("envelope", f"{op.name} {impl.name}: ran outside its envelope, needs an error for {example}")


def _contract(checks: PairChecks, base: Example) -> None:
    """A tensor of a dtype that no rule allows is refused by name, with nothing written."""
    values = as_device(arguments(checks.op, base), checks.device)
    name = next(
        (n for n, r in checks.op.inputs.items() if isinstance(r, TensorRule) and isinstance(values[n], Tensor)), None
    )
    if name is None:
        return
    wrong: Mapping[str, Any] = {**values, name: torch.zeros_like(values[name], dtype=torch.int16)}
    before = {n: t.clone() for n, t in tensors_of(values).items()}
    try:
        with checks.selected(), torch.no_grad():
            checks.op(*wrong.values())
    except ContractError as error:
        if name not in str(error) or checks.op.name not in str(error):
            raise CheckFailed("contract", f"the error names neither op nor argument: {error}") from error
    else:
        got = dtype_name(torch.int16)
        raise CheckFailed("contract", f"{checks.op.name}: accepted {name} in {got}, needs a ContractError")
    for n, tensor in tensors_of(values).items():
        if not same_bits(tensor, before[n]):
            raise CheckFailed("contract", f"{checks.op.name}: wrote {n} before it refused the call")
