"""Ceilings of one backend by instruction level, so that a kernel is compared with its own instruction's best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.perf.peaks import Peaks
from glm5sdk.registry import backends

__all__ = ["Ceilings", "measure_ceilings"]


@dataclass(frozen=True)
class Ceilings:
    """What one backend's levels can reach on this machine.

    Attributes:
        bandwidth: bytes a second read from memory.
        levels: the backend's, lowest first.
        flops: for each level that was measured, operations a second by dtype (f32, bf16, int8).
        threads: that measured.
    """

    bandwidth: float
    levels: tuple[str, ...]
    flops: Mapping[str, Mapping[str, float]]
    threads: int

    def flops_of(self, level: str, dtype: str) -> float:
        """Operations a second of the best instruction that code of `level` would use for products of `dtype`.

        A level without one of its own uses the nearest lower level's; where there is none, the level's f32.

        Raises:
            ContractError: the level is unknown here, or nothing was measured for it.
        """
        if level not in self.levels:
            raise ContractError(f"ceilings: level is {level!r}, needs one of {', '.join(self.levels)}")
        allowed = [name for name in self.levels[: self.levels.index(level) + 1] if name in self.flops]
        for kind in (dtype, "f32"):
            for name in reversed(allowed):
                if kind in self.flops[name]:
                    return self.flops[name][kind]
        raise ContractError(f"ceilings: nothing was measured for {dtype} at or below {level}, needs an f32 rate")

    def peaks_of(self, level: str, dtype: str) -> Peaks:
        """The same as `Peaks` for `achieved`, every dtype of which answers this level's rate for `dtype`."""
        return Peaks(self.bandwidth, {"f32": self.flops_of(level, dtype)}, self.threads)

    def best_with(self, other: Ceilings) -> Ceilings:
        """The higher of each rate: of two measurements on one machine, the lower one was disturbed."""
        flops = {
            level: {kind: max(rate, other.flops.get(level, {}).get(kind, 0.0)) for kind, rate in rates.items()}
            for level, rates in self.flops.items()
        }
        return Ceilings(max(self.bandwidth, other.bandwidth), self.levels, flops, self.threads)

    def to_dict(self) -> dict[str, Any]:
        """For a report in JSON."""
        flops = {level: dict(rates) for level, rates in self.flops.items()}
        return {"bandwidth": self.bandwidth, "flops": flops, "threads": self.threads}


@lru_cache(maxsize=4)
def measure_ceilings(backend: str = "cpu", seconds: float = 0.05, read_bytes: int = 1 << 29) -> Ceilings:
    """Ask a backend for its ceilings; kept for the process, so that every row of a report meets the same ones.

    Args:
        backend: its name.
        seconds: spent on each instruction.
        read_bytes: read to measure bandwidth; more than the last cache holds.

    Raises:
        UnavailableError: there is no such backend, it cannot run here, or it measures no ceilings.
    """
    found = backends().get(backend)
    if found is None or found.reason or found.peaks is None:
        why = "not installed" if found is None else found.reason or "without a way to measure them"
        raise UnavailableError(f"ceilings: backend {backend} is {why}, needs one that measures its own peaks")
    measured = found.peaks(seconds, read_bytes)
    threads = found.threads() if found.threads is not None else 1
    return Ceilings(measured["bandwidth"], found.levels, measured["flops"], threads)
