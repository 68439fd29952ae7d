"""What the registry costs around a kernel that does nothing: targets are 10 us validated, 1 us resolved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm5sdk import ops
from glm5sdk.registry import Device, Impl, register_backend, unregister_backend, use

H, C, R, K, S, PAGES = 64, 512, 64, 2048, 64, 40


class NullBackend:
    """A kernel that returns at once."""

    name = "null"
    api_version = 1
    levels = ()
    automatic = False

    def probe(self) -> Device:
        return Device("cpu", "nothing")

    def impls(self) -> list[Impl]:
        names = ("sparse_flash_attention", "rms_norm")
        return [Impl(op, "null.kernel", "native", lambda *args: None, invariant=True) for op in names]


@pytest.fixture(autouse=True)
def _null() -> Iterator[None]:
    register_backend(NullBackend())
    with use("null"), torch.no_grad():
        yield
    unregister_backend("null")


@pytest.fixture
def attention() -> tuple[Any, ...]:
    """A decode step of one token: five tensors, GLM-5's geometry."""
    return (
        torch.zeros(1, H, C + R, dtype=torch.bfloat16),
        torch.zeros(PAGES, S, C + R, dtype=torch.bfloat16),
        torch.zeros(1, PAGES, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.arange(K, dtype=torch.int32).view(1, 1, K),
        0.0625,
        C,
    )


def test_validated_call(benchmark: Any, attention: tuple[Any, ...]) -> None:
    benchmark(ops.sparse_flash_attention, *attention)


def test_validation_alone(benchmark: Any, attention: tuple[Any, ...]) -> None:
    benchmark(ops.sparse_flash_attention.contract.bind, *attention)


def test_outputs_alone(benchmark: Any, attention: tuple[Any, ...]) -> None:
    bound = ops.sparse_flash_attention.contract.bind(*attention)
    benchmark(ops.sparse_flash_attention.contract.alloc, bound)


def test_resolved_call(benchmark: Any, attention: tuple[Any, ...]) -> None:
    benchmark(ops.sparse_flash_attention.resolve(*attention), *attention)


def test_resolved_kernel(benchmark: Any, attention: tuple[Any, ...]) -> None:
    contract = ops.sparse_flash_attention.contract
    resolved = ops.sparse_flash_attention.resolve(*attention)
    bound = contract.bind(*attention)
    benchmark(resolved.kernel, *bound.args, *contract.alloc(bound))


def test_two_tensors(benchmark: Any) -> None:
    benchmark(ops.rms_norm, torch.zeros(1, 6144), torch.zeros(6144))


def test_through_torch_library(benchmark: Any) -> None:
    view, contract = ops.rms_norm.view, ops.rms_norm.contract
    flat = contract.flatten(torch.zeros(1, 6144), torch.zeros(6144))
    benchmark(view, flat)


def test_one_torch_operator(benchmark: Any) -> None:
    x = torch.zeros(1, 6144)
    benchmark(torch.add, x, x)
