"""`make demo`: train a tiny GLM-5 on real text, save it, load it, let it write; then show why the selection matters."""

from __future__ import annotations

import os
import time
from pathlib import Path

import demo_language
import demo_selection
import torch
from demo_report import implementations_table
from rich.console import Console

OUT = Path(__file__).resolve().parents[1] / "demo"
FULL_SECONDS = 120.0


def main() -> None:
    """Both parts, by GLM5_DEMO_SECONDS (of training, 120 by default) and GLM5_DEMO_SEED (0 by default)."""
    started = time.perf_counter()
    seconds = float(os.environ.get("GLM5_DEMO_SECONDS") or FULL_SECONDS)
    seed = int(os.environ.get("GLM5_DEMO_SEED") or 0)
    torch.set_num_threads(min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 8))
    console = Console(highlight=False)
    OUT.mkdir(exist_ok=True)

    console.rule("[bold]A tiny GLM-5 learns Python")
    demo_language.run(console, OUT, seconds, seed)
    console.print(implementations_table())
    console.rule("[bold]The selection matters")
    demo_selection.run(console, OUT, seconds / FULL_SECONDS, seed)
    console.print(f"\n{time.perf_counter() - started:.0f} s in all. Look into {OUT.name}/.")


if __name__ == "__main__":
    main()
