"""Tables as text, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def seconds(value: float) -> str:
    """A duration with a unit that keeps three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def against(reached: float | None, target: float | None, form: str) -> str:
    """`1.9x (2x)`: what was reached and, in brackets, the target; a star where it fell short."""
    if reached is None:
        return "-"
    text = form.format(reached)
    return text if target is None else f"{text} ({form.format(target)}){'' if reached >= target else '*'}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *rows]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For a document."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def machine_line(facts: dict[str, Any], bandwidth: float | None = None) -> str:
    """One sentence on where the figures come from."""
    roof = "" if bandwidth is None else f", {bandwidth / 1e9:.1f} GB/s read"
    return (
        f"{facts['processor']}, {facts['threads']} threads, last cache {facts['last_level_cache_bytes'] >> 20} MiB, "
        f"torch {facts['torch']}, load {facts['load_average']} at the start{roof}"
    )


def save_json(path: Path, content: Any) -> None:
    """Pretty, so that changes can be read."""
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
