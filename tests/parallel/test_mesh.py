"""Meshes: who is in a group with whom, and what is said when the numbers do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from glm5sdk.core.errors import ContractError
from glm5sdk.parallel import ProcessGroup, close_processes, join_processes, make_mesh


def work(rank: int, folder: Path) -> None:
    """One of four processes, laid out 2 by 2 and then all along one axis."""
    join_processes(rank, 4, f"file://{folder}/meeting", timeout_s=60)
    try:
        mesh = make_mesh({"data": 2, "expert": 2, "none": 1})
        data, expert = mesh["data"], mesh["expert"]
        assert (data.rank, expert.rank, data.size, expert.size) == (rank // 2, rank % 2, 2, 2)
        # The processes along an axis are found by summing their numbers.
        assert expert.total(10**rank) == (11 if rank < 2 else 1100)
        assert data.total(10**rank) == (101 if rank % 2 == 0 else 1010)
        assert mesh["none"] == ProcessGroup() and mesh["none"].total(7) == 7
        with pytest.raises(ContractError, match="axis is 'tensor', needs one of data, expert, none"):
            mesh["tensor"]
        with pytest.raises(ContractError, match="needs lengths whose product is 4"):
            make_mesh({"data": 3})
        line = make_mesh({"all": 4})["all"]
        assert line.total(1) == 4 and line.share(8, "x") == range(2 * rank, 2 * rank + 2)
    finally:
        close_processes()


def test_four_processes_by_axes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (tmp_path,), nprocs=4)


def test_one_process_needs_no_meeting() -> None:
    mesh = make_mesh({"data": 1, "expert": 1})
    assert mesh["expert"] == ProcessGroup()
    assert mesh["expert"].share(5, "experts") == range(5)
    close_processes()


def test_refusals() -> None:
    with pytest.raises(ContractError, match="device is 'tpu', needs one of cpu, cuda, npu"):
        join_processes(0, 1, "file:///nowhere", device="tpu")
    with pytest.raises(ContractError, match="rank is 2, needs 0 to 1"):
        join_processes(2, 2, "file:///nowhere")
    with pytest.raises(ContractError, match="experts is 7, needs a multiple of the group's 2"):
        ProcessGroup("g", 0, 2).share(7, "experts")
