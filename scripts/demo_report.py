"""Which implementation ran each op of this process."""

from __future__ import annotations

from rich.table import Table

from glm5sdk.registry.spec import CATALOGUE


def implementations_table() -> Table:
    """One row for each op that was called: its forward implementations, and its gradient's if it had one."""
    table = Table(title="what ran", title_justify="left", box=None, header_style="bold")
    for column in ("op", "forward", "gradient"):
        table.add_column(column)
    for name, op in sorted(CATALOGUE.items()):
        if name.endswith("_bwd") or not _ran(name):
            continue
        table.add_row(name, _ran(name), _ran(f"{name}_bwd") if op.backward is not None else "")
    return table


def _ran(name: str) -> str:
    """Names of the implementations that selection has chosen for an op so far."""
    op = CATALOGUE.get(name)
    return ", ".join(sorted({impl.name for impl in op._selected.values()})) if op is not None else ""
