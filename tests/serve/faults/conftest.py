"""One tiny checkpoint, one server process and the offline answers, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import Offline, RealServer, save_model, serving

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="session")
def fault_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights."""
    return save_model(tmp_path_factory.mktemp("fault") / "model", seed=0)


@pytest.fixture(scope="session")
def offline(fault_model: Path) -> Offline:
    """What each request must say."""
    return Offline(fault_model)


@pytest.fixture(scope="session")
def server(fault_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One process for the tests that leave it as it was."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(fault_model, log, "--num-pages", "256", "--max-num-seqs", "8") as running:
        yield running
