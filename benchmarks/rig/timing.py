"""Competitors measured in turn, each call on inputs that have left the caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

SAMPLE_SECONDS = 3e-3  # calls shorter than this are timed several at a time
WARM_CALLS = 2


def interleaved(
    runners: Mapping[str, Callable[[int], object]],
    sets: int,
    repeats: int,
    summary: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Seconds a call of each runner.

    Runners take turns within each repeat, so that whatever else the machine does meets all of them alike. A call gets
    the number of the input set to use. Sets rotate, and each runner starts at another place of the rotation: none
    finds in the caches what the one before it has read.

    Args:
        runners: name -> function of a set's number.
        sets: how many there are.
        repeats: samples of each runner, at least 1.
        summary: of a runner's samples; `min` for ratios that a busy machine must not disturb.
    """
    names = list(runners)
    at = {name: sets * n // len(names) for n, name in enumerate(names)}
    calls, samples = {}, {name: [] for name in names}

    def sample(name: str, count: int) -> float:
        run, start = runners[name], at[name]
        begin = time.perf_counter()
        for i in range(count):
            run((start + i) % sets)
        took = time.perf_counter() - begin
        at[name] = (start + count) % sets
        return took / count

    for name in names:
        once = min(sample(name, 1) for _ in range(WARM_CALLS))
        calls[name] = max(1, round(SAMPLE_SECONDS / max(once, 1e-9)))
    for _ in range(repeats):
        for name in names:
            samples[name].append(sample(name, calls[name]))
    return {name: summary(values) for name, values in samples.items()}
