"""How fast something is, and how fast it could be on this machine."""

from __future__ import annotations

from glm5sdk.perf.ceilings import Ceilings, measure_ceilings
from glm5sdk.perf.peaks import Peaks, measure_peaks
from glm5sdk.perf.roofline import Achieved, achieved
from glm5sdk.perf.timers import Timing, time_call

__all__ = [
    "Achieved",
    "Ceilings",
    "Peaks",
    "Timing",
    "achieved",
    "measure_ceilings",
    "measure_peaks",
    "time_call",
]
