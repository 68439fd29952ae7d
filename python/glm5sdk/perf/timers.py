"""One way to time a call: warm it up, repeat it for a while, look at the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from glm5sdk.core.errors import ContractError

__all__ = ["Timing", "time_call", "wait_for_device"]

SAMPLE_SECONDS = 1e-3  # a sample shorter than this would time the clock


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        best: fastest sample.
        median: middle sample; what to report.
        samples: how many.
        calls: calls in each sample.
    """

    best: float
    median: float
    samples: int
    calls: int


def time_call(function: Callable[[], Any], seconds: float = 0.3, device: str = "cpu") -> Timing:
    """Time a call on a device.

    Args:
        function: what to call; the same work each time.
        seconds: how long to measure, after one call that warms up and one that sizes a sample.
        device: torch device type; asynchronous ones are waited for at the ends of each sample.

    Raises:
        ContractError: no time to measure in.
    """
    if seconds <= 0:
        raise ContractError(f"time_call: seconds is {seconds}, needs more than 0")
    function()
    once = _sample(function, 1, device)
    calls = max(1, round(SAMPLE_SECONDS / max(once, 1e-9)))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        samples.append(_sample(function, calls, device) / calls)
    return Timing(min(samples), statistics.median(samples), len(samples), calls)


def _sample(function: Callable[[], Any], calls: int, device: str) -> float:
    wait_for_device(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait_for_device(device)
    return time.perf_counter() - start


def wait_for_device(device: str) -> None:
    """Return once an asynchronous device has finished what it was given; at once on the CPU."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()
