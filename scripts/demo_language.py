"""Part one: the Python standard library as text, GLM-5's recipe, a checkpoint, and a continuation of a prompt."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.text import Tokenizer
from glm5sdk.train import TrainConfig, TrainResult, glm5_phases, train
from glm5sdk.train.data import standard_library
from glm5sdk.train.plot import plot_losses

PROMPT = '''import os
import sys


class Reader:
    """Read lines from a file and count them."""

    def __init__(self, path, encoding=None):
        self.path = path
        self.encoding = encoding
        self.lines = []

    def close(self):
'''
NEW_TOKENS = 120


def run(console: Console, out: Path, seconds: float, seed: int) -> None:
    """Train, plot, save, load, write, report."""
    files = standard_library()
    size = sum(f.stat().st_size for f in files) / 1e6
    console.print(f"{len(files)} files of the Python standard library, {size:.1f} MB; {seconds:.0f} s of training")
    result = train(TrainConfig(files, phases=glm5_phases(seconds), seed=seed, progress=True))
    plot_losses(result.history, out / "loss.png", "tiny GLM-5 on the Python standard library")
    result.save(out / "checkpoint")

    model = Glm5ForCausalLM.from_pretrained(out / "checkpoint")
    check_same(result.model, model)
    console.print(f"\nsaved {out.name}/checkpoint and loaded it back: same bits. It continues a prompt:\n")
    speed = write(console, model, Tokenizer.from_pretrained(out / "checkpoint"), seed)
    console.print(figures_table(result, speed))


def check_same(trained: Glm5ForCausalLM, loaded: Glm5ForCausalLM) -> None:
    """Stop unless both models give the same logits to the bit."""
    ids = torch.arange(128)[None] % trained.config.vocab_size
    with torch.no_grad():
        same = torch.equal(trained(ids), loaded(ids))
    if not same:
        raise SystemExit("demo: the loaded model's logits differ from the trained model's")


def write(console: Console, model: Glm5ForCausalLM, tokenizer: Tokenizer, seed: int) -> float:
    """Print the prompt and, token by token, its continuation; tokens per second."""
    ids = tokenizer.encode(PROMPT)
    if len(ids) <= model.config.index_topk:
        raise SystemExit(f"demo: prompt is {len(ids)} tokens, needs more than index_topk {model.config.index_topk}")
    stream = tokenizer.stream()
    times = [time.perf_counter()]

    def show(step: Tensor) -> None:
        times.append(time.perf_counter())
        console.out(stream.push(int(step[0])), end="", highlight=False)

    console.out(PROMPT, end="", style="dim", highlight=False)
    model.generate(
        torch.tensor([ids]), max_new_tokens=NEW_TOKENS, temperature=0.6, top_p=0.95, seed=seed, on_token=show
    )
    console.out(stream.finish() + "\n", highlight=False)
    return (len(times) - 2) / max(times[-1] - times[1], 1e-9)


def figures_table(result: TrainResult, decode_speed: float) -> Table:
    """Held-out quality, speed and memory."""
    final, speed = result.final, result.tokens_per_second
    table = Table(title="figures", title_justify="left", box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "bits per byte, held-out files": f"{final.sparse.bits_per_byte:.3f} sparse, "
        f"{final.dense.bits_per_byte:.3f} dense ({final.sparse.tokens:,} tokens)",
        "sparse - dense": f"{final.gap:+.4f} nats per token, {result.model.config.index_topk} of up to 256 keys",
        "training, tokens/s": ", ".join(f"{kind} {value:,.0f}" for kind, value in speed.items()),
        "decoding, tokens/s": f"{decode_speed:,.0f}",
        "steps": f"{len(result.history):,}",
        "peak memory": f"{result.peak_memory / 2**20:,.0f} MiB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
