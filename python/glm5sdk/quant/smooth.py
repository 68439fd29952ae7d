"""Moving outliers of activations into weights by powers of two, which changes no bit of the float model.

A column of a matrix times s, and whatever makes that column's input divided by s, is the same function. With s a power
of two every product is the same number, so the model's own results stay to the bit (short of underflow); only what
int8 makes of activations and weights changes.

Source of the idea: Xiao and others 2022, SmoothQuant; here with powers of two and the strength chosen by output error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.ops._weights import project, quantize_weight

__all__ = ["Consumer", "powers"]

_STRENGTHS = (0.25, 0.5, 0.75)
_WORTH = 0.98  # of the error without; anything less is noise


@dataclass(frozen=True)
class Consumer:
    """A matrix that reads the activations.

    Attributes:
        weight: [O, N].
        kind: what it will be quantised to.
    """

    weight: Tensor
    kind: str


def powers(x: Tensor, consumers: Sequence[Consumer]) -> Tensor | None:
    """Powers of two [N] by which to divide x and multiply columns, or None where that does not help.

    Args:
        x: [T, N] calibration activations.
        consumers: the matrices; their summed squared relative output errors decide, with nearest rounding.
    """
    if len(x) == 0:
        return None
    x = x.float()
    weights = [c.weight.detach().float() for c in consumers]
    largest = torch.stack([(w.abs() / w.abs().amax().clamp(min=1e-30)).amax(0) for w in weights]).amax(0)
    wanted = [x @ w.T for w in weights]

    def error(s: Tensor) -> float:
        total = 0.0
        for w, want, c in zip(weights, wanted, consumers, strict=True):
            got = project(x / s, quantize_weight(w * s, c.kind))
            total += float((got - want).square().sum() / want.square().sum().clamp(min=1e-30))
        return total

    least, best = _WORTH * error(torch.ones_like(largest)), None
    for strength in _STRENGTHS:
        s = _power_of_two(x.abs().amax(0).clamp(min=1e-6) ** strength / largest.clamp(min=1e-6) ** (1 - strength))
        found = error(s)
        if found < least:
            least, best = found, s
    return best


def _power_of_two(s: Tensor) -> Tensor:
    """Nearest powers of two around a median of 1, within 2^-8 and 2^8."""
    exponent = s.log2()
    return torch.exp2((exponent - exponent.median()).round().clamp(-8, 8))
