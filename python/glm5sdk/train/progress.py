"""What a person sees while a run goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from glm5sdk.train.config import Phase
from glm5sdk.train.trainer import Record, Trainer

__all__ = ["Progress"]

_TITLES = {"dense": "dense training", "indexer": "indexer warm-up", "sparse": "sparse adaptation"}


class Progress:
    """A bar for each phase on standard error, with loss and speed; nothing when `show` is false.

    Args:
        show: None means only on a terminal.
    """

    def __init__(self, show: bool | None = None) -> None:
        enabled = sys.stderr.isatty() if show is None else show
        columns = (
            TextColumn("{task.description:<18}"), BarColumn(28), TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(), TextColumn("{task.fields[figures]}"),
        )  # fmt: skip
        self._bar = Bar(*columns, console=Console(stderr=True), disable=not enabled)
        self._tasks: dict[int, object] = {}
        self._loss = self._speed = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line above the bars."""
        if not self._bar.disable:
            self._bar.console.print(f"[dim]{text}[/dim]")

    def show(self, trainer: Trainer, record: Record, phases: Sequence[Phase]) -> None:
        """Move the bar of the record's phase."""
        if self._bar.disable:
            return
        first = record.phase not in self._tasks
        if first:
            title = _TITLES[phases[record.phase].kind]
            self._tasks[record.phase] = self._bar.add_task(title, total=1.0, figures="")
        loss = record.kl if record.kind == "indexer" else record.language
        speed = record.tokens / record.seconds
        self._loss = loss if first else 0.95 * self._loss + 0.05 * loss
        self._speed = speed if first else 0.95 * self._speed + 0.05 * speed
        name = "kl" if record.kind == "indexer" else "loss"
        over = trainer.phase != record.phase
        self._bar.update(
            self._tasks[record.phase],  # type: ignore[arg-type]
            completed=1.0 if over else min(trainer.passed(), 1.0),
            figures=f"{name} {self._loss:.3f}  {self._speed:,.0f} tokens/s",
        )
