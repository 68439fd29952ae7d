"""Timers, ceilings and the roofline: arithmetic against numbers made by hand."""

from __future__ import annotations

import time

import pytest

from glm5sdk.core.errors import ContractError
from glm5sdk.perf import Peaks, achieved, measure_peaks, time_call
from glm5sdk.registry import Cost

PEAKS = Peaks(bandwidth=1e9, flops={"f32": 1e10, "bf16": 4e10}, threads=2)


def test_a_call_is_timed_with_its_pauses_and_without_its_first() -> None:
    calls = []

    def pause() -> None:
        calls.append(0)
        time.sleep(0.2 if len(calls) == 1 else 0.005)

    timing = time_call(pause, seconds=0.05)
    assert 0.005 <= timing.best <= timing.median < 0.2
    assert timing.samples * timing.calls + 2 == len(calls)


def test_short_calls_are_timed_in_groups() -> None:
    timing = time_call(lambda: None, seconds=0.01)
    assert timing.calls > 100
    assert 0 < timing.best < 1e-5


@pytest.mark.parametrize(
    ("cost", "dtype", "bound", "share"),
    [
        (Cost(1e10, 0, 0), "f32", "compute", 0.5),
        (Cost(1e10, 0, 0), "bf16", "compute", 0.125),
        (Cost(1e10, 0, 0), "f16", "compute", 0.5),
        (Cost(1e6, 6e8, 4e8), "f32", "memory", 0.5),
        (Cost(0, 0, 0), "f32", "memory", 0.0),
    ],
)
def test_the_longer_of_both_ceilings_bounds(cost: Cost, dtype: str, bound: str, share: float) -> None:
    got = achieved(cost, 2.0, PEAKS, dtype)
    assert (got.bound, got.share) == (bound, pytest.approx(share))
    assert (got.flops, got.bandwidth) == (cost.flops / 2, cost.bytes / 2)
    assert f"{share:.1%} of the {bound} roof" in str(got)


def test_no_time_is_refused() -> None:
    with pytest.raises(ContractError, match=r"achieved: seconds is 0.0, needs more than 0"):
        achieved(Cost(1, 1, 1), 0.0, PEAKS, "f32")
    with pytest.raises(ContractError, match=r"time_call: seconds is 0, needs more than 0"):
        time_call(lambda: None, seconds=0)


def test_peaks_are_measured_once_a_process() -> None:
    peaks = measure_peaks(size=64, copy_bytes=1 << 16)
    assert peaks is measure_peaks(size=64, copy_bytes=1 << 16)
    assert set(peaks.flops) == {"f32", "bf16"}
    assert min(peaks.bandwidth, *peaks.flops.values()) > 0
