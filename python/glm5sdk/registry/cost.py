"""What an op must do at least: the numerator of every roofline figure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cost"]


@dataclass(frozen=True)
class Cost:
    """Work that no implementation can avoid.

    Attributes:
        flops: floating point operations (a multiply-add counts two).
        bytes_read: bytes that must come from memory once.
        bytes_written: bytes that must go to memory once.
    """

    flops: float
    bytes_read: float
    bytes_written: float

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written
        )
