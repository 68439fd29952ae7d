"""Stored ratios to torch, by class of processor, and what has changed against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import glm5sdk

FOLDER = Path(__file__).resolve().parents[1] / "baselines"
MARGIN = 0.3  # share of a ratio that may be lost to a busy machine before it counts as a regression
NOTABLE = 0.1  # smaller changes are not worth a line


@dataclass
class Baselines:
    """Ratios (torch's seconds over ours) of one class of processors.

    Attributes:
        processor: where they were measured.
        threads: with how many.
        margin: a ratio below stored * (1 - margin) is a regression.
        ratios: by the name of a case.
    """

    processor: str = ""
    threads: int = 0
    margin: float = MARGIN
    ratios: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Baselines:
        """From its file; empty when there is none."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        """Rounded, so that a diff shows what matters."""
        path.parent.mkdir(exist_ok=True)
        content = vars(self) | {"ratios": {name: round(r, 2) for name, r in sorted(self.ratios.items())}}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def fell(self, name: str, ratio: float) -> bool:
        """Whether a ratio is worse than the stored one by more than the margin; never for a case without one."""
        return name in self.ratios and ratio < self.ratios[name] * (1 - self.margin)

    def changes(self, now: Mapping[str, float]) -> list[str]:
        """One line for each case that moved, is new, or was not run."""
        lines = []
        for name in sorted({*self.ratios, *now}):
            if name not in now:
                lines.append(f"{name}: {self.ratios[name]:.2f}x is stored, was not run")
            elif name not in self.ratios:
                lines.append(f"{name}: {now[name]:.2f}x, nothing is stored")
            elif abs(change := now[name] / self.ratios[name] - 1) >= NOTABLE:
                word = "FELL" if self.fell(name, now[name]) else "slower" if now[name] < self.ratios[name] else "faster"
                lines.append(f"{name}: {self.ratios[name]:.2f}x -> {now[name]:.2f}x, {change:.0%} {word}")
        return lines


def processor_class() -> str:
    """The best instruction level that the CPU backend has here, such as `amx`; `reference` without it."""
    cpu = glm5sdk.backends().get("cpu")
    if cpu is None or cpu.reason:
        return "reference"
    here = {impl.variant for impl in cpu.impls}
    return next(level for level in reversed(cpu.levels) if level in here)
