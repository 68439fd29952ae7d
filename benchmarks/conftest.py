"""Benchmarks are bench_*.py: pytest finds them here and nowhere else, and ends with speeds under the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rig.baselines import FOLDER, Baselines, processor_class
from rig.machine import facts

ROWS: list[str] = []
RATIOS: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of bench_regression.py."""
    parser.addoption(
        "--update-baselines", action="store_true", help="store this run's ratios for this processor's class"
    )


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


@pytest.fixture(scope="session")
def ratios() -> dict[str, float]:
    """What bench_regression.py finds, by case."""
    return RATIOS


@pytest.fixture(scope="session")
def stored(request: pytest.FixtureRequest) -> Baselines:
    """What it is compared with; nothing while new ratios are to be stored."""
    return Baselines() if request.config.getoption("--update-baselines") else Baselines.load(_baselines())


def _baselines() -> Path:
    return FOLDER / f"{processor_class()}.json"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what the ops reached, and what changed."""
    if RATIOS:
        path = _baselines()
        old = Baselines.load(path)
        terminalreporter.section(f"ratios to torch against {path.name}", sep="-")
        for line in old.changes(RATIOS) or ["nothing moved by a tenth"]:
            terminalreporter.write_line(line)
        if config.getoption("--update-baselines"):
            machine = facts()
            ratios = {**old.ratios, **RATIOS}
            Baselines(machine["processor"], machine["threads"], old.margin, ratios).save(path)
            terminalreporter.write_line(f"stored in {path.name}")
    if ROWS:
        terminalreporter.section("achieved", sep="-")
        for row in ROWS:
            terminalreporter.write_line(row)
