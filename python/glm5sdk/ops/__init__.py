"""The operator catalogue: one op, one file; everything above is built on these alone."""

from __future__ import annotations

from glm5sdk.ops.norm.rms_norm import rms_norm

__all__ = ["rms_norm"]
