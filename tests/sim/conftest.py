"""Tests of the CUDA simulator need its compiled module."""

from __future__ import annotations

import pytest


def _available() -> bool:
    try:
        from glm5sdk_sim import _C  # noqa: F401  the compiled part, which a checkout may lack
    except ImportError:
        return False
    return True


def pytest_ignore_collect() -> bool | None:
    """Leave the folder out where the module is not built."""
    return None if _available() else True


@pytest.fixture(autouse=True)
def _plain_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule from outside would replace those the tests choose."""
    monkeypatch.delenv("GLM5SDK_CUDA_SIM", raising=False)
