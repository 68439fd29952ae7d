"""Benchmarks are bench_*.py: pytest finds them here and nowhere else, and ends with speeds under the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROWS: list[str] = []


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect bench_*.py as modules of tests."""
    named = parent.session.isinitpath(file_path)  # pytest takes a file that was asked for by itself
    if file_path.suffix == ".py" and file_path.name.startswith("bench_") and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="session")
def rows() -> list[str]:
    """Lines of the report at the end."""
    return ROWS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the ops reached."""
    if ROWS:
        terminalreporter.section("achieved", sep="-")
        for row in ROWS:
            terminalreporter.write_line(row)
