"""What the measuring script and its child processes agree on; needs nothing but Python, as children may lack torch."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARK = "glm5-benchmark-result "
CHUNK = 2048  # prompt tokens a step, for everybody


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        kind: `prefill` (tokens a second of a prompt of `context` tokens), `decode` (seconds a step of `batch`
            requests that have `context` tokens each), `indexer` (of a decode step: seconds, and how many of them the
            indexer takes), `memory` (bytes above the weights for such a prefill) or `logits` (of the last of
            `context` tokens, to compare).
        context: tokens.
        batch: requests.
        steps: decode steps in a sample.
        repeats: samples; the median counts.
        int8: weights as int8.
        random_fill: put random rows into the caches instead of running the prompt, for long contexts.
    """

    kind: str
    context: int
    batch: int = 1
    steps: int = 16
    repeats: int = 3
    int8: bool = False
    random_fill: bool = False


def token_ids(count: int, vocabulary: int, request: int = 0) -> list[int]:
    """The same tokens for every program: far from regular, never a special one."""
    return [16 + (i * i * 31 + i * 7919 + request * 104729) % (vocabulary - 16) for i in range(count)]


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall clock of a call, after one that warms up."""
    call()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def resident_bytes() -> int:
    """Of this process, now."""
    return _status("VmRSS")


class PeakMemory:
    """Most bytes resident at once since `restart`, above what was resident when it was made."""

    def __init__(self) -> None:
        self.before = resident_bytes()
        self.restart()

    def restart(self) -> None:
        """Forget peaks so far: those of loading, say."""
        Path("/proc/self/clear_refs").write_text("5")

    def above(self) -> int:
        return _status("VmHWM") - self.before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def serve(load: Callable[[argparse.Namespace], Any]) -> None:
    """A child's main: read the arguments, make the program's own `runner`, run each workload, print the results.

    A runner has `about() -> dict`, and `run(workload) -> number or list`; what it cannot do raises Unsupported.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--option", default="")
    options = parser.parse_args()
    runner = load(options)
    for values in json.loads(options.workloads):
        try:
            value, why = runner.run(Workload(**values)), ""
        except Unsupported as error:
            value, why = None, str(error)
        print(MARK + json.dumps({"workload": values, "value": value, "why": why}), flush=True)
    print(MARK + json.dumps({"about": runner.about()}), flush=True)


class Unsupported(Exception):
    """This program cannot do that; the sentence says why."""


def as_arguments(workloads: list[Workload]) -> str:
    """For --workloads."""
    return json.dumps([asdict(w) for w in workloads])


def parse_line(line: str) -> dict[str, Any] | None:
    """A result that a child printed; None for whatever else it says."""
    return json.loads(line[len(MARK) :]) if line.startswith(MARK) else None


def refuse(why: str) -> None:
    """End a child whose program is not here."""
    sys.exit(f"absent: {why}")
