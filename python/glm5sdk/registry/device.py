"""The registry's only view of torch: names of dtypes and devices, and the namespace that compiled contracts run in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

__all__ = ["ACTIVATIONS", "CONTRACT_NAMESPACE", "SYMBOLIC", "Device", "Tensor", "dtype_name", "named_dtype"]

_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # sizes and scalars while a graph is traced
ACTIVATIONS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
QUANTISED = frozenset({torch.int8, torch.float8_e4m3fn})
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers while a graph is traced


@dataclass(frozen=True)
class Device:
    """What a backend's probe found.

    Attributes:
        type: torch's device type (`cpu`, `cuda`, `npu`).
        name: what a person calls it.
        detail: anything a doctor's report should show (instruction level, memory, driver).
    """

    type: str
    name: str
    detail: dict[str, str] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype (`bf16`), or torch's own where there is none."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def named_dtype(name: str) -> torch.dtype:
    """The dtype of a short name."""
    return _DTYPES[name]


def grad_enabled() -> bool:
    return torch.is_grad_enabled()


CONTRACT_NAMESPACE: dict[str, Any] = {
    "Tensor": Tensor,
    "Dtype": torch.dtype,
    # Exactly these types run natively; every other subclass (fake, functional, distributed) goes through torch.library.
    "ORDINARY": frozenset({Tensor, Parameter, Buffer}),
    "ACTIVATIONS": ACTIVATIONS,
    "QUANTISED": QUANTISED,
    "grad_enabled": torch.is_grad_enabled,
    "empty": torch.empty,
    **_DTYPES,
}


def without_autocast(device: Any) -> AbstractContextManager[Any] | None:
    """What switches autocast off on a device, None where it is off: ops say their roundings themselves."""
    try:
        on = torch.is_autocast_enabled(device.type)
    except RuntimeError:  # a device that knows no autocast, such as meta
        return None
    return torch.autocast(device.type, enabled=False) if on else None


def scratch(size: int, device: Any) -> Tensor:
    """`size` bytes of uninitialised workspace."""
    return torch.empty(size, dtype=torch.uint8, device=device)
