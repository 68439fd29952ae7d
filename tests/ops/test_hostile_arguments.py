"""Arguments that nobody should pass: every op refuses them with a sentence, or means the same by them everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.registry import CATALOGUE
from glm5sdk.registry.contract_scalars import scalar_kind
from glm5sdk.registry.plugins import backends
from glm5sdk.registry.shapes import TensorRule
from glm5sdk.testing.inputs import Example, arguments, clone

OPS = sorted(n for n in ops.__all__ if not n.startswith("all_to_all"))
BACKENDS = ["reference", *(["cpu"] if "cpu" in backends() and not backends()["cpu"].reason else [])]
NAN = float("nan")
SCALARS: list[Any] = [
    None, "x", "", [1], object(), np.zeros(3, np.float32), np.int64(2), np.float32(0.5), np.bool_(True), True, 0, 1, -1,
    2**40, 2**63, 2**70, 10**400, 1.0, -1.5, NAN, float("inf"), 1j, torch.float32, torch.int32, torch.tensor(2),
    torch.tensor(0.5), "fp8_ds_mla", "softmax",
]  # fmt: skip
WRONG_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.float().numpy(),
    "no axis": lambda t: torch.zeros((), dtype=t.dtype),
    "one more axis": lambda t: t[None],
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[..., :0],
    "bool": lambda t: t.bool(),
    "int16": lambda t: t.to(torch.int16),
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}
SAME_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "lazily negated": lambda t: torch._neg_view(-t),
    "inference": lambda t: t,
}
INTEGERS = (-1, -2, 0, 1000, 2**31 - 1, -(2**31), 2**40, -(2**63))


def example(name: str) -> dict[str, Any]:
    """The op's smallest geometry with rows, drawn the same each time."""
    op = CATALOGUE[name]
    sizes = {axis: {"T": 4, "R": 2, "N": 8, "P": 6, "M": 2}.get(axis, 3) for axis in op.contract.axes}
    sizes |= {"E": 6} if "E" in sizes else {}
    sizes |= {"G": 1} if "G" in sizes else {}
    sizes |= {"P": 8} if "P" in sizes else {}
    return arguments(op, Example(0, tuple(sizes.items()), "f32"))


def is_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_sparse and not value.is_meta


def outcome(name: str, backend: str, values: dict[str, Any]) -> tuple[Any, ...] | ContractError:
    """What a call gives, written arguments included; on an error nothing may have been written."""
    op = CATALOGUE[name]
    before = {m: values[m].clone() for m in op.mutates if is_memory(values[m])}
    refusal: ContractError | None = None
    try:
        with glm5sdk.use(backend):
            result = op(**values)
    except ContractError as error:
        refusal = error
    except UnavailableError as error:
        refusal = ContractError(str(error))  # an honest refusal of a named backend
    if refusal is not None:
        assert "need" in str(refusal), refusal
        for mutated, old in before.items():
            assert same(values[mutated], old), f"{mutated} was written before the error: {refusal}"
        return refusal
    outputs = () if result is None else result if isinstance(result, tuple) else (result,)
    return (*outputs, *(values[m] for m in op.mutates))


def same(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or b.is_meta:
        return a.shape == b.shape and a.dtype == b.dtype
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True)


def agree(name: str, what: str, make: Callable[[], dict[str, Any]]) -> None:
    """Every backend refuses, or all give the same."""
    results = [outcome(name, backend, make()) for backend in BACKENDS]
    refused = [isinstance(r, ContractError) for r in results]
    assert len(set(refused)) == 1, f"{name} {what}: refused by {dict(zip(BACKENDS, results, strict=True))}"
    for other in results[1:]:
        assert refused[0] or all(map(same, results[0], other)), f"{name} {what}: results differ"


@pytest.mark.parametrize("name", OPS)
def test_scalars(name: str) -> None:
    op = CATALOGUE[name]
    base = example(name)
    for argument in op.signature.parameters:
        if isinstance(op.inputs.get(argument), TensorRule):
            continue
        assert argument in op.inputs or scalar_kind(op.signature.parameters[argument])[0], argument
        for value in SCALARS:
            agree(name, f"{argument}={value!r:.20}", lambda a=argument, v=value: {**clone(base), a: v})


@pytest.mark.parametrize("name", OPS)
def test_wrong_tensors(name: str) -> None:
    base = example(name)
    for argument in (a for a, v in base.items() if isinstance(v, Tensor)):
        for what, change in WRONG_TENSORS.items():
            if what == "sparse" and base[argument].dtype == torch.float8_e4m3fn:
                continue  # torch has no such tensors
            agree(name, f"{argument} {what}", lambda a=argument, f=change: {**(c := clone(base)), a: f(c[a])})


@pytest.mark.parametrize("name", OPS)
def test_the_same_numbers_in_odd_memory(name: str) -> None:
    op = CATALOGUE[name]
    base = example(name)
    for backend in BACKENDS:
        want = outcome(name, backend, clone(base))
        assert not isinstance(want, ContractError), want
        for argument in (a for a, v in base.items() if isinstance(v, Tensor) and a not in op.mutates):
            for what, change in SAME_TENSORS.items():
                if what == "lazily negated" and base[argument].dtype not in (torch.float32, torch.bfloat16):
                    continue
                with torch.inference_mode(what == "inference"):
                    odd = {**clone(base), argument: change(base[argument].clone())}
                got = outcome(name, backend, odd)
                assert not isinstance(got, ContractError) and all(map(same, got, want)), f"{argument} {what}: {got}"


@pytest.mark.parametrize("name", OPS)
def test_integers_out_of_range(name: str) -> None:
    base = example(name)
    for argument, value in base.items():
        if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
            continue
        limits = torch.iinfo(value.dtype)
        for integer in (i for i in INTEGERS if limits.min <= i <= limits.max):
            for place in (slice(None), 0, -1):

                def make(a: str = argument, i: int = integer, p: Any = place) -> dict[str, Any]:
                    values = clone(base)
                    values[a].view(-1)[p] = i
                    return values

                agree(name, f"{argument}[{place}]={integer}", make)


@pytest.mark.parametrize("name", [n for n in OPS if CATALOGUE[n].mutates])
def test_written_memory_is_nobody_elses(name: str) -> None:
    """Inputs inside the cache, a cache with shared elements, a negated or strided cache: refused, nothing written."""
    op = CATALOGUE[name]
    (cache,) = op.mutates
    base = example(name)
    for argument in (a for a, v in base.items() if isinstance(v, Tensor) and v.is_floating_point() and a != cache):

        def overlapping(a: str = argument) -> dict[str, Any]:
            values = clone(base)
            room = max(values[a].numel(), values[cache].numel())
            arena = torch.zeros(room)
            inside = arena[room - values[a].numel() :].view_as(values[a]).copy_(values[a])
            return {**values, cache: arena[: values[cache].numel()].view_as(values[cache]), a: inside}

        for backend in BACKENDS:
            got = outcome(name, backend, overlapping())
            assert isinstance(got, ContractError) and "shares memory" in str(got), f"{argument}: {got}"
    for change in (lambda t: t[:1].expand(t.shape), lambda t: torch._neg_view(t), SAME_TENSORS["strided"]):
        for backend in BACKENDS:
            values = clone(base)
            got = outcome(name, backend, {**values, cache: change(values[cache])})
            assert isinstance(got, ContractError), got


def test_neighbours_in_one_arena_do_not_share_memory() -> None:
    arena = torch.zeros(4 * 6 + 2 * 6)
    rows, cache = arena[24:].view(2, 6).fill_(1.0), arena[:24].view(2, 2, 6)
    ops.concat_and_cache_mla(rows, cache, torch.tensor([3, 0]), 4)
    assert cache.sum() == 12
