"""What quantisation cost: output errors by layer, bytes, and distance of the distributions."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from glm5sdk.quant.measure import Divergence

__all__ = ["KINDS", "ModuleError", "Report"]

KINDS = ("attention", "indexer", "mlp", "experts")


@dataclass(frozen=True)
class ModuleError:
    """Error of one module's output on calibration activations; inputs and selected keys are the float model's.

    Attributes:
        layer: number; the MTP layer is the last.
        kind: one of KINDS.
        name: module within the layer: a block (`self_attn`, `mlp`, `mlp.experts`) or one of its linears.
        weight: kind of weight, or "" for a block.
        nearest: ||y_q - y|| / ||y|| with nearest rounding, without smoothing; NaN for a block.
        error: the same with the weights that were chosen.
    """

    layer: int
    kind: str
    name: str
    weight: str
    nearest: float
    error: float


@dataclass
class Report:
    """Everything `glm5 quantize` prints and saves.

    Attributes:
        scheme, method: how.
        modules: errors of every block and linear.
        bytes_before, bytes_after: of all tensors of the checkpoints, by kind ("other" is what stays float).
        keys_kept: by layer with an indexer, the share of the float model's selected keys that are still selected.
        calibration_tokens: how many tokens the weights were chosen on.
        divergence: from the float model on held-out text.
    """

    scheme: str
    method: str
    modules: list[ModuleError] = field(default_factory=list)
    bytes_before: dict[str, int] = field(default_factory=dict)
    bytes_after: dict[str, int] = field(default_factory=dict)
    keys_kept: dict[int, float] = field(default_factory=dict)
    calibration_tokens: int = 0
    divergence: Divergence | None = None

    def blocks(self, kind: str) -> dict[int, float]:
        """Error of a kind's blocks by layer: of the block where there is one, else of its linears together."""
        found = {m.layer: m.error for m in self.modules if m.kind == kind and not m.weight}
        for layer in {m.layer for m in self.modules if m.kind == kind} - set(found):
            found[layer] = _mean([m.error for m in self.modules if m.kind == kind and m.layer == layer])
        return dict(sorted(found.items()))

    def linears(self, kind: str) -> tuple[float, float]:
        """(nearest, chosen): root mean square error of a kind's linears over all layers."""
        rows = [m for m in self.modules if m.kind == kind and m.weight]
        return _mean([m.nearest for m in rows]), _mean([m.error for m in rows])

    def saving(self, kind: str) -> float:
        """Bytes after over bytes before, less 1; -0.5 is half."""
        before = self.bytes_before.get(kind, 0)
        return self.bytes_after.get(kind, 0) / before - 1 if before else 0.0

    def to_json(self) -> bytes:
        """The report as a JSON document; numbers that do not exist are null."""
        values: dict[str, Any] = {
            "scheme": self.scheme,
            "method": self.method,
            "calibration_tokens": self.calibration_tokens,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "saving": {kind: self.saving(kind) for kind in self.bytes_before},
            "blocks": {kind: self.blocks(kind) for kind in KINDS},
            "keys_kept": self.keys_kept,
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "modules": [asdict(m) for m in self.modules],
        }
        return (json.dumps(_finite(values), indent=2) + "\n").encode()


def _mean(errors: list[float]) -> float:
    known = [e for e in errors if not math.isnan(e)]
    return math.sqrt(sum(e * e for e in known) / len(known)) if known else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
