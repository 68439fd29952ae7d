"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

__all__ = ["Backends", "Dtype", "Model"]

Backends = Annotated[
    Optional[list[str]],  # noqa: UP045  typer reads this spelling
    typer.Option("--backend", "-b", help="Backend or cap to use (cpu, cpu.avx2, reference); may repeat, in order."),
]
Model = Annotated[Path, typer.Argument(help="Checkpoint folder: config.json, safetensors, tokenizer.json.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto for the checkpoint's own.")]
