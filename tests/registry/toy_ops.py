"""Toy ops and toy backends for the registry's own tests; defined once, since torch.library takes a name once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from glm5sdk.registry import Cost, Device, Impl, Requires, WeightLike, op, register_backend, unregister_backend
from glm5sdk.registry.weight import as_weight


@op(
    inputs={"x": "a[T, N]", "y": "a[T, N]", "bias": "a[N]?"},
    outputs={"z": "a[T, N]"},
    rows="T",
    grad=("x", "y", "bias"),
    cost=lambda axes, size: Cost(axes["T"] * axes["N"], 0, 0),
)
def toy_multiply(x: Tensor, y: Tensor, bias: Tensor | None = None, mode: str = "plain", scale: float = 1.0) -> Tensor:
    """z = scale * x * y + bias."""
    z = scale * x * y
    return z if bias is None else z + bias


def _composed(x: Tensor, y: Tensor) -> Tensor:
    return toy_multiply(x, y)


@op(
    inputs={"x": "a[T, N]", "y": "a[T, N]"},
    outputs={"z": "a[T, N]"},
    rows="T",
    composed=_composed,
)
def toy_composed(x: Tensor, y: Tensor) -> Tensor:
    """x * y, from toy_multiply or alone."""
    return x * y


@op(
    inputs={"rows": "a[T, L]", "cache": "a[P, L]", "slots": "i64[T]"},
    outputs={},
    rows="T",
    mutates=("cache",),
)
def toy_write(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """cache[slots] = rows."""
    cache[slots] = rows


@op(
    inputs={"x": "a[T, N]", "w": "W[O, N]"},
    outputs={"y": "a[T, O]"},
    rows="T",
    grad=("x", "w"),
)
def toy_linear(x: Tensor, w: WeightLike) -> Tensor:
    """x w^T."""
    return x @ as_weight(w).tensors[0].T


@op(
    inputs={
        "q": "a[T, H, C+R]",
        "kv_cache": "kv_cache[P, S, C, R]",
        "index_cache": "index_cache[P2, S2, Di]",
        "half": "a[T, 2*I]",
        "iw": "f32[T, Di]",
        "page": "i32[T]",
        "v_dim": "= C",
    },
    outputs={"out": "a[T, H, C]", "sums": "f32[T]", "picked": "i32[T, I]"},
    rows="T",
)
def toy_paged(
    q: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    half: Tensor,
    iw: Tensor,
    page: Tensor,
    v_dim: int,
    format: str = "plain",
) -> tuple[Tensor, Tensor, Tensor]:
    """Every word of the shape language at once."""
    picked = torch.zeros(half.shape[0], half.shape[1] // 2, dtype=torch.int32)
    return q[..., :v_dim].clone(), iw.sum(-1), picked


@op(inputs={"x": "f32[T]"}, outputs={"y": "f32[T]"}, rows="T")
def toy_float(x: Tensor) -> Tensor:
    """An op without an activation dtype."""
    return x + 1


@op(inputs={"x": "a[T, N]"}, outputs={"y": "out_dtype[T, N]"}, rows="T")
def toy_cast(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x in another dtype."""
    return x.to(out_dtype or x.dtype)


def multiply_kernel(x: Tensor, y: Tensor, bias: Tensor | None, mode: str, scale: float, z: Tensor) -> None:
    """toy_multiply as a kernel: into a given output."""
    z.copy_(toy_multiply.reference(x, y, bias, mode, scale))


class Toy:
    """A backend from a list of rows, with whatever else a test sets."""

    def __init__(self, name: str = "toy", impls: tuple[Impl, ...] = (), **attributes: Any) -> None:
        self.name, self._impls = name, impls
        self.api_version: int = 1
        self.levels: tuple[str, ...] = ()
        self.automatic = True
        self.found: Device | str = Device("cpu", "toy")
        self.__dict__.update(attributes)

    def probe(self) -> Device | str:
        return self.found

    def impls(self) -> list[Impl]:
        return list(self._impls)


def row(name: str, fn: Callable[..., Any] = multiply_kernel, op: str = "toy_multiply", **more: Any) -> Impl:
    """One native implementation."""
    return Impl(op, name, "native", fn, **{"priority": 10, **more})


@contextmanager
def installed(*backends: Toy) -> Iterator[list[Any]]:
    """Backends that are there for a while."""
    loaded = [register_backend(b) for b in backends]
    try:
        yield loaded
    finally:
        for b in backends:
            unregister_backend(b.name)


def operands(rows: int = 3, width: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x and y [rows, width]."""
    generator = torch.Generator().manual_seed(rows * 100 + width)
    return (
        torch.randn(rows, width, generator=generator).to(dtype),
        torch.randn(rows, width, generator=generator).to(dtype),
    )


ONLY_F32 = Requires(device=("cpu",), dtypes=("f32",))
