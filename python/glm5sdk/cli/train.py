"""`glm5 train`: the single-process trainer, its plot and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from glm5sdk.cli.choose import chosen
from glm5sdk.core.errors import UnavailableError
from glm5sdk.train.config import OptimizerConfig, TrainConfig, glm5_phases
from glm5sdk.train.run import TrainResult, train

__all__ = ["train_model"]


def train_model(
    console: Console,
    data: Sequence[Path],
    out: Path,
    model: str,
    start: Path | None,
    resume: bool,
    minutes: float | None,
    steps: int | None,
    optimizer: str,
    batch_size: int,
    seq_len: int,
    seed: int,
    save_every: int,
    backends: Sequence[str],
) -> None:
    """Run the recipe, then write `out`/model (a Hugging Face checkpoint) and `out`/loss.png.

    Raises:
        ContractError: a setting or the data does not fit; nothing was written.
    """
    total, unit = (float(steps), "steps") if steps is not None else ((minutes or 2.0) * 60, "seconds")
    config = TrainConfig(
        data=data, out=out, model=model, start=start, resume=resume, phases=glm5_phases(total, unit),
        optimizer=OptimizerConfig(name=optimizer), batch_size=batch_size, seq_len=seq_len, seed=seed,
        save_every=save_every,
    )  # fmt: skip
    with chosen(backends):
        result = train(config)
    result.save(out / "model")
    plotted = _plot(result, out / "loss.png")
    final = result.final
    console.print(
        f"{out / 'model'}: {final.sparse.bits_per_byte:.3f} bits per byte on held-out text, "
        f"sparse - dense {final.gap:+.4f} nats, "
        f"{', '.join(f'{kind} {speed:.0f}' for kind, speed in result.tokens_per_second.items())} tokens/s, "
        f"peak memory {result.peak_memory / 1e9:.2f} GB{plotted}",
        highlight=False,
    )


def _plot(result: TrainResult, file: Path) -> str:
    """Plot if matplotlib is here; what to tell the person about it."""
    from glm5sdk.train.plot import plot_losses

    try:
        plot_losses(result.history, file)
    except UnavailableError as error:
        return f"; no plot: {error}"
    return f"; plot in {file}"
