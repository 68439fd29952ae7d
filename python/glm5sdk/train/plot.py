"""The course of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.train.trainer import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure", "plot_losses", "save_figure"]

INK, BLUE, ORANGE, GREEN = "#333333", "#2b6cb0", "#dd6b20", "#2f855a"
_NEIGHBOURS = 4  # steps on each side
_TITLES = {"dense": "dense", "indexer": "indexer\nwarm-up", "sparse": "sparse"}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that needs no display; sizes in inches.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise UnavailableError("plot: matplotlib is missing, needs it to draw: pip install 'glm5sdk[train]'") from error
    figure = NewFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a PNG at 120 dots per inch."""
    figure.savefig(path, format="png", dpi=120)


def plot_losses(history: Sequence[Record], path: str | PathLike[str], title: str = "") -> None:
    """Draw language, MTP and indexer losses over steps, phases shaded, and write a PNG.

    Raises:
        ContractError: there are no steps.
        UnavailableError: matplotlib is not installed.
    """
    if not history:
        raise ContractError("plot: history is empty, needs at least one step")
    figure = new_figure(8, 5)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2.2, 1)})
    language = [r for r in history if r.kind != "indexer"]
    _curve(upper, language, [r.language for r in language], BLUE, "next token")
    if any(r.mtp for r in language):
        _curve(upper, language, [r.mtp for r in language], ORANGE, "token after next (MTP)")
    indexer = [r for r in history if r.kind != "dense"]
    _curve(lower, indexer, [r.kl for r in indexer], GREEN, "indexers, KL over all layers")
    upper.set_ylabel("loss, nats per token")
    lower.set_ylabel("KL, nats")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        _phases(axes, history, named=axes is upper)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper right")
    if title:
        figure.suptitle(title, color=INK)
    save_figure(figure, path)


def _curve(axes: Axes, records: Sequence[Record], values: Sequence[float], color: str, label: str) -> None:
    """The values faintly, the mean of each with its neighbours clearly; a gap where steps are missing."""
    for number, (start, end) in enumerate(_stretches(records)):
        steps, raw = [r.step for r in records[start:end]], values[start:end]
        windows = [raw[max(0, i - _NEIGHBOURS) : i + _NEIGHBOURS + 1] for i in range(len(raw))]
        axes.plot(steps, raw, color=color, alpha=0.25, linewidth=0.8)
        name = label if number == 0 else None
        axes.plot(steps, [sum(w) / len(w) for w in windows], color=color, linewidth=1.6, label=name)


def _stretches(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Ranges of records whose steps follow each other."""
    cuts = [i for i in range(1, len(records)) if records[i].step != records[i - 1].step + 1]
    edges = [0, *cuts, len(records)] if records else []
    return list(pairwise(edges))


def _phases(axes: Axes, history: Sequence[Record], named: bool) -> None:
    """Shade every other phase, and write its name at the foot of the upper panel."""
    for number, phase in enumerate(dict.fromkeys(r.phase for r in history)):
        steps = [r.step for r in history if r.phase == phase]
        first, last = steps[0] - 0.5, steps[-1] + 0.5
        if number % 2:
            axes.axvspan(first, last, color=INK, alpha=0.06, linewidth=0)
        if named:
            kind = next(r.kind for r in history if r.phase == phase)
            axes.annotate(
                _TITLES[kind], ((first + last) / 2, 0.03), xycoords=("data", "axes fraction"), ha="center",
                va="bottom", color=INK, fontsize=8,
            )  # fmt: skip
