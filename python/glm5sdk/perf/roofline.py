"""Achieved speed against what the machine allows, from an op's declared cost."""

from __future__ import annotations

from dataclasses import dataclass

from glm5sdk.core.errors import ContractError
from glm5sdk.perf.peaks import Peaks
from glm5sdk.registry import Cost

__all__ = ["Achieved", "achieved"]


@dataclass(frozen=True)
class Achieved:
    """One measured call.

    Attributes:
        seconds: of the call.
        flops: operations a second.
        bandwidth: bytes a second, of the bytes that no implementation can avoid.
        bound: `compute` or `memory`, whichever needs longer at the ceilings.
        share: least possible seconds over measured ones; 1 = at the roofline, more = the working set was cached.
    """

    seconds: float
    flops: float
    bandwidth: float
    bound: str
    share: float

    def __str__(self) -> str:
        rates = f"{self.flops / 1e9:9.2f} GFLOP/s {self.bandwidth / 1e9:8.2f} GB/s"
        return f"{self.seconds * 1e6:12.1f} us {rates} {self.share:6.1%} of the {self.bound} roof"


def achieved(cost: Cost, seconds: float, peaks: Peaks, dtype: str) -> Achieved:
    """Place a measurement under the roofline.

    Args:
        cost: least work of the call.
        seconds: measured.
        peaks: ceilings of the machine.
        dtype: short name of the activation dtype.

    Raises:
        ContractError: the time is not positive.
    """
    if seconds <= 0:
        raise ContractError(f"achieved: seconds is {seconds}, needs more than 0")
    compute, memory = cost.flops / peaks.flops_of(dtype), cost.bytes / peaks.bandwidth
    bound = "compute" if compute > memory else "memory"
    return Achieved(seconds, cost.flops / seconds, cost.bytes / seconds, bound, max(compute, memory) / seconds)
