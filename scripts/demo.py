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
FULL_SECONDS = 180.0


def main() -> None:
    """Both parts, by GLM5_DEMO_SECONDS (of training, 180 by default) and GLM5_DEMO_SEED (0 by default)."""
    started = time.perf_counter()
    seconds = float(os.environ.get("GLM5_DEMO_SECONDS") or FULL_SECONDS)
    seed = int(os.environ.get("GLM5_DEMO_SEED") or 0)
    console = Console(highlight=False)
    settle_threads()
    OUT.mkdir(exist_ok=True)

    console.rule("[bold]A tiny GLM-5 learns Python")
    demo_language.run(console, OUT, seconds, seed)
    console.print(implementations_table())
    console.rule("[bold]The selection matters")
    demo_selection.run(console, OUT, seconds / FULL_SECONDS, seed)
    console.print(f"\n{time.perf_counter() - started:.0f} s in all. Look into {OUT.name}/.")


def settle_threads() -> None:
    """Use every core, unless others are busy on them: then threads wait for each other, and one alone is faster."""
    a, b = torch.randn(512, 192), torch.randn(192, 512)
    done = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        started, done[threads] = time.perf_counter(), 0
        while time.perf_counter() < started + 0.3:
            (a @ b).sigmoid_()
            done[threads] += 1
    torch.set_num_threads(max(done, key=lambda n: done[n]))


if __name__ == "__main__":
    main()
