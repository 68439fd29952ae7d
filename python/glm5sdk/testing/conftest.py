"""Which tests the suite has: one per (op, implementation) pair of the backend, and a few per op."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5sdk.testing.plugin import selected_backend
from glm5sdk.testing.tiers import TIERS, Tier


@pytest.fixture(scope="session")
def tier(pytestconfig: pytest.Config) -> Tier:
    """How much to run."""
    return TIERS[pytestconfig.getoption("tier")]


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> str:
    """The backend under test."""
    return selected_backend(pytestconfig)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The shortest tier leaves torch's view out."""
    tier = TIERS.get(getattr(config.option, "tier", ""))
    return True if collection_path.name == "test_torch_view.py" and tier and not tier.torch_view else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Pairs and ops come from the registry."""
    from glm5sdk.registry import get_op
    from glm5sdk.testing.pairs import ops_to_run, pairs_to_run

    backend = selected_backend(metafunc.config)
    name = metafunc.config.getoption("tier")
    only = metafunc.config.getoption("op")
    if "pair" in metafunc.fixturenames:
        pairs = pairs_to_run(backend, TIERS[name], only)
        metafunc.parametrize("pair", pairs, ids=[f"{op}-{impl}" for op, impl in pairs])
    ops = ops_to_run(only) if TIERS[name].torch_view else []
    if "op_name" in metafunc.fixturenames:
        metafunc.parametrize("op_name", ops)
    if "grad_op_name" in metafunc.fixturenames:
        metafunc.parametrize("grad_op_name", [op for op in ops if get_op(op).backward is not None])
