"""The suite's own test: kernels with seeded faults are caught, each by a check that names it, and honest ones pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from mutant_kernels import HONEST, MUTANTS, Mutant, MutantBackend

from glm5sdk.registry import backends, get_op, register_backend, unregister_backend
from glm5sdk.testing import TIERS, CheckFailed, check_pair

TIER = replace(TIERS["test"], name="mutants", examples=16)


@pytest.fixture(scope="module", autouse=True)
def _backend() -> Iterator[None]:
    loaded = register_backend(MutantBackend())
    assert loaded.reason == ""
    yield
    unregister_backend("mutant")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.op}-{m.name}")
def test_fault_is_caught(mutant: Mutant) -> None:
    tier = replace(TIER, seconds=0.15) if mutant.checks == ("quick",) else TIER
    with pytest.raises(CheckFailed) as caught:
        check_pair(get_op(mutant.op), f"mutant.{mutant.name}", tier)
    assert caught.value.check in mutant.checks, str(caught.value)
    assert mutant.op in str(caught.value)
    assert mutant.name in str(caught.value)
    assert "seed=" in str(caught.value) or caught.value.check == "envelope"


@pytest.mark.parametrize("op", HONEST)
def test_honest_kernel_passes(op: str) -> None:
    report = check_pair(get_op(op), "mutant.honest", replace(TIERS["smoke"], examples=6))
    assert report.examples >= 6


def test_mutants_never_run_unasked() -> None:
    assert backends()["mutant"].automatic is False
