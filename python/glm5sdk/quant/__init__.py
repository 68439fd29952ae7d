"""Quantisation of models: weights chosen on calibration text, and what they cost in accuracy."""

from __future__ import annotations

from glm5sdk.quant.measure import Divergence, compare_logits, held_out_states
from glm5sdk.quant.model import METHODS, quantise_model
from glm5sdk.quant.report import ModuleError, Report
from glm5sdk.quant.scheme import SCHEMES, Scheme, check_model, scheme

__all__ = [
    "METHODS", "SCHEMES", "Divergence", "ModuleError", "Report", "Scheme", "check_model", "compare_logits",
    "held_out_states", "quantise_model", "scheme",
]  # fmt: skip
