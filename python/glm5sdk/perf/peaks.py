"""What this machine reaches at best, measured by torch in the same run: no data sheet, no other day's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from glm5sdk.perf.timers import time_call

__all__ = ["Peaks", "measure_peaks"]

COPY_BYTES = 1 << 28  # well past any last-level cache
MATMUL_SIZE = 1536


@dataclass(frozen=True)
class Peaks:
    """Ceilings of one machine.

    Attributes:
        bandwidth: bytes a second that a large copy reads and writes together.
        flops: floating point operations a second of a large square product, by short dtype name.
        threads: of torch while measuring.
    """

    bandwidth: float
    flops: dict[str, float]
    threads: int

    def flops_of(self, dtype: str) -> float:
        """The ceiling of a dtype; f32's for one that was not measured."""
        return self.flops.get(dtype, self.flops["f32"])


@lru_cache(maxsize=4)
def measure_peaks(
    device: str = "cpu", dtypes: Sequence[str] = ("f32", "bf16"), size: int = MATMUL_SIZE, copy_bytes: int = COPY_BYTES
) -> Peaks:
    """Measure a copy and a square product.

    Args:
        device: torch device type.
        dtypes: short names; f32 is always measured.
        size: rows and columns of the product.
        copy_bytes: bytes of the tensor copied.

    Returns:
        The ceilings; kept for the process, so that every row of a report is compared with the same ones.
    """
    source = torch.zeros(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy = time_call(lambda: target.copy_(source), device=device)
    flops = {}
    for name in dict.fromkeys(("f32", *dtypes)):
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[name]
        a = torch.ones(size, size, dtype=dtype, device=device)
        product = time_call(lambda a=a: a @ a, device=device)  # type: ignore[misc]
        flops[name] = 2 * size**3 / product.best
    return Peaks(2 * copy_bytes / copy.best, flops, torch.get_num_threads())
