"""`explain`: which implementation a call would run and, for each other one, every reason why not."""

from __future__ import annotations

from dataclasses import dataclass

from glm5sdk.registry.select import Choice

__all__ = ["Explanation"]


@dataclass(frozen=True)
class Explanation:
    """Printable answer of `explain`.

    Attributes:
        op: the op's name.
        call: the call in words: dtype, device, axes.
        choice: what selection decided.
    """

    op: str
    call: str
    choice: Choice

    @property
    def chosen(self) -> str | None:
        """Name of the implementation that runs, None when nothing can."""
        return self.choice.impl.name if self.choice.impl else None

    def __str__(self) -> str:
        lines = [f"{self.op}({self.call})", f"  runs: {self.chosen or 'nothing'} ({self.choice.why})"]
        for impl, reasons in self.choice.rows:
            mark = "->" if impl is self.choice.impl else "  "
            lines.append(f"  {mark} {impl.name:<18} {impl.kind:<9} {'; '.join(reasons) if reasons else 'can run'}")
        return "\n".join(lines)
