"""Learning-rate schedules as functions of how much of a phase has passed."""

from __future__ import annotations

import math

from glm5sdk.train.config import Phase

__all__ = ["factor"]


def factor(phase: Phase, passed: float) -> float:
    """Factor on the learning rates.

    Args:
        phase: whose schedule.
        passed: fraction of the phase behind us, in steps or in seconds; clamped to [0, 1].

    Returns:
        `phase.lr` times the schedule: a straight rise over `warmup`, then a half cosine down to `final` ("cosine"), or
        a plateau and a straight fall to `final` over the last `decay` ("wsd").
    """
    x = min(max(passed, 0.0), 1.0)
    if x < phase.warmup:
        return phase.lr * x / phase.warmup
    if phase.schedule == "cosine":
        down = 0.5 - 0.5 * math.cos(math.pi * (x - phase.warmup) / (1 - phase.warmup))
    else:
        down = max(0.0, 1 - (1 - x) / phase.decay) if phase.decay else float(x >= 1)
    return phase.lr * (1 - down * (1 - phase.final))
