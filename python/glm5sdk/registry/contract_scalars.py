"""Scalar arguments of an op: which kind each one is, and the one meaning that every implementation gets to see.

A reference would take whatever torch broadcasts and a binding whatever it converts; here both get the same int, float,
bool, str or dtype, or neither gets anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import contract_errors as errors
from glm5sdk.registry.device import SYMBOLIC, Tensor

__all__ = ["READERS", "scalar_kind", "scalar_lines"]

INT64 = 2**63
INT32 = 2**31


def scalar_kind(parameter: inspect.Parameter) -> tuple[str, bool]:
    """(bool, float, int, str, dtype or "", whether None is legal), read off the annotation."""
    words = inspect.formatannotation(parameter.annotation).strip("'").replace(" ", "")
    kind = words.removesuffix("|None").rpartition(".")[2]
    return (kind if kind in READERS else ""), "None" in words


def scalar_lines(name: str, parameter: inspect.Parameter) -> list[str]:
    """Source lines that check one scalar and bring it to its Python type; the right type costs one comparison."""
    kind, optional = scalar_kind(parameter)
    if not kind:
        return []
    exact = {"dtype": "Dtype"}.get(kind, kind)
    wrong = f"type({name}) is not {exact}" + (f" and {name} is not None" if optional else "")
    lines = [f"if {wrong}:", f"    {name} = scalars[{kind!r}](OP, {name!r}, {name})"]
    if kind == "float":
        lines += [f"if {name} != {name}:", f"    raise errors.type(OP, {name!r}, {name}, 'a number')"]
    if kind == "int":
        given = f"{name} is not None and " if optional else ""
        lines += [
            f"if {given}not -{INT64} <= {name} < {INT64}:",
            f"    raise errors.type(OP, {name!r}, {name}, 'an int of 64 bits')",
        ]
    return lines


def as_int(op: str, name: str, value: Any, want: str = "an int") -> Any:
    """Ints of other libraries become int; a bool, a tensor or a float is a mistake, not a number."""
    if isinstance(value, SYMBOLIC):
        return value
    if isinstance(value, (bool, Tensor)) or not hasattr(type(value), "__index__"):
        raise errors.type(op, name, value, want)
    try:
        return int(value.__index__())
    except (TypeError, ValueError):  # arrays have the method and refuse
        raise errors.type(op, name, value, want) from None


def as_size(op: str, name: str, value: Any) -> Any:
    """The size of an axis: what indices of 32 bits can count."""
    size = value if type(value) is int else as_int(op, name, value, "a size >= 0")
    if size < 0 or (type(size) is int and size >= INT32):
        raise errors.type(op, name, size, "a size >= 0" if size < 0 else f"a size below {INT32}")
    return size


def as_float(op: str, name: str, value: Any) -> Any:
    """Ints and floats of other libraries become float; bools, tensors and strings do not."""
    if isinstance(value, SYMBOLIC):
        return value
    if isinstance(value, (bool, Tensor, str, complex)) or getattr(value, "shape", ()) != ():
        raise errors.type(op, name, value, "a float")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise errors.type(op, name, value, "a float") from None
    except OverflowError:
        raise ContractError(f"{op}: {name} is an int of {value.bit_length()} bits, needs one a float holds") from None


def as_bool(op: str, name: str, value: Any) -> Any:
    """Only bools of other libraries: 0, 1 and "false" are refused, since two of them would surprise."""
    if isinstance(value, SYMBOLIC):
        return value
    if type(value).__name__ in ("bool_", "bool") and not isinstance(value, Tensor):
        return bool(value)
    raise errors.type(op, name, value, "True or False")


def as_str(op: str, name: str, value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    raise errors.type(op, name, value, "a string")


def as_dtype(op: str, name: str, value: Any) -> Any:
    raise errors.type(op, name, value, "a torch.dtype")


READERS: dict[str, Callable[[str, str, Any], Any]] = {
    "int": as_int,
    "float": as_float,
    "bool": as_bool,
    "str": as_str,
    "dtype": as_dtype,
}
