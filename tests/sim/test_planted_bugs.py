"""Small kernels with one planted bug each: the simulator names the line under every schedule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from sim_cases import SCHEDULES

from glm5sdk_sim import _C, scheduled

SOURCES = Path(__file__).resolve().parents[2] / "csrc/sim/cuda/selftest"
WHAT = {
    "missing_barrier": "data race|nothing has written",
    "missing_warp_barrier": "data race|nothing has written",
    "missing_second_barrier": "data race|nothing has written",
    "missing_copy_wait": "asynchronous copy of thread",
    "missing_barrier_after_copy": "nothing has written|data race|asynchronous copy of thread",
    "early_refill": "data race|asynchronous copy of thread",
    "copy_in_flight_at_end": "ends before it has waited",
    "unaligned_copy_source": "source .* is unaligned",
    "copy_behind_the_end": r"behind the end of `in`",
    "unaligned_matrix_row": "unaligned",
    "outside_of_shared_array": r"at byte 256 of an array of 256 bytes",
    "arrays_exceed_launch": "the launch gave 8192",
    "uninitialised_shared": "nothing has written",
    "read_behind_the_end": r"access to address .* bytes behind the end of `in`",
    "write_behind_the_end": r"write to address .* bytes behind the end of `out`",
    "null_pointer": "a null pointer",
    "divergent_barrier": "divergent barrier",
    "barrier_after_exit": "ends, but others wait for all threads|thread have ended",
    "partial_warp": "partial warp|its warp waits for it",
    "divergent_warp": "divergent warp",
    "lane_outside_of_mask": "not in its own mask",
    "deadlock": "deadlock",
    "stack_overflow": "stack is full",
    "no_full_wait": "nothing has written|asynchronous copy of thread|data race",
    "no_empty_wait": "data race|asynchronous copy of thread|of a phase that expects 1|deadlock",
    "early_release": "data race|asynchronous copy of thread",
    "result_in_flight": "wgmma under way",
    "over_arrival": "arrival 2 of a phase that expects 1",
    "no_init": "before mbarrier_init",
    "no_arrival": "deadlock",
}
# The line of the stack's end depends on where the compiler put its accesses; a reader that runs ahead of the copy and a
# copy that overtakes a reader are one bug with two lines.
ELSEWHERE = {"stack_overflow", "no_full_wait", "no_empty_wait", "early_release"}


def _lines(name: str) -> set[int]:
    """The lines marked with a kernel's name."""
    return {
        number
        for path in SOURCES.glob("*.cu")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"// BUG .*\b{name}\b", line)
    }


def _run(name: str, bug: bool) -> torch.Tensor:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.zeros(64, 64)
    _C.selftest(name, bug, values, out)
    return out


def test_every_kernel_is_known_here() -> None:
    assert set(_C.selftests()) == set(WHAT)
    assert all(_lines(name) for name in WHAT), "a kernel marks no line"


@pytest.mark.parametrize("name", WHAT)
def test_bug_is_named_and_its_repair_is_silent(name: str) -> None:
    want: torch.Tensor | None = None
    for order, copies, seed in SCHEDULES:
        with scheduled(order, copies, seed):
            got = _run(name, False)
            want = got if want is None else want
            assert torch.equal(got, want), (order, copies, seed)
            with pytest.raises(_C.KernelFault, match=WHAT[name]) as caught:
                _run(name, True)
        message = str(caught.value)
        assert f"GLM5SDK_CUDA_SIM=order={order},copies={copies},seed={seed}" in message
        named = {int(n) for n in re.findall(r"csrc/sim/cuda/selftest/\w+\.cu:(\d+)", message)}
        if name not in ELSEWHERE:
            assert named & _lines(name), message


def test_a_fault_leaves_the_outputs_alone() -> None:
    out = torch.full((64, 64), 7.0)
    with pytest.raises(_C.KernelFault):
        _C.selftest("read_behind_the_end", True, torch.zeros(64, 64).bfloat16(), out)
    assert bool((out == 7.0).all())


def test_the_printed_variable_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduled("random", "random", 12), pytest.raises(_C.KernelFault) as first:
        _run("missing_barrier", True)
    variable, _, value = str(first.value).rpartition(" ")[2].partition("=")
    monkeypatch.setenv(variable, value)
    with pytest.raises(_C.KernelFault) as again:
        _run("missing_barrier", True)
    assert str(again.value) == str(first.value)


def test_matrix_units_agree_with_torch() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = 4 * values.double() @ values.double().T
    assert (_run("no_init", False).double() - want).abs().max() < 1e-4
