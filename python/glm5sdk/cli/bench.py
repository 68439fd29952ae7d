"""`glm5 bench`: how fast a checkpoint runs on this machine, and what machines cost per token."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

import glm5sdk
from glm5sdk.cli.choose import chosen
from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM
from glm5sdk.nn.cache import LatentCache
from glm5sdk.perf.report import Comparison, Prices, Report, Results, Workload, compare, read_prices, read_report
from glm5sdk.perf.timers import wait_for_device

__all__ = ["Measure", "bench_model", "compare_reports"]

CHUNK = 2048  # prompt tokens a step, all requests together; what `generate` uses


@dataclass(frozen=True)
class Measure:
    """How to measure.

    Attributes:
        batch: requests at a time.
        prompt_tokens, new_tokens: of each.
        repeats: of prefill and decode; medians count.
        threads: of torch and of native backends; None leaves them.
        device: torch device type.
        dtype: as `Glm5ForCausalLM.from_pretrained` takes it.
        hardware: name for the report; by default the processor's or accelerator's.
    """

    batch: int = 1
    prompt_tokens: int = 512
    new_tokens: int = 64
    repeats: int = 3
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "auto"
    hardware: str | None = None


def bench_model(
    console: Console, path: Path, measure: Measure, backends: Sequence[str], json_path: Path | None
) -> None:
    """Measure a checkpoint, print the figures, and write them when a path was given.

    Raises:
        ContractError: a count is below 1. CapacityError: prompt and continuation exceed the model's positions.
        CheckpointError: a file of the checkpoint is missing or damaged.
    """
    for name in ("batch", "prompt_tokens", "new_tokens", "repeats", "threads"):
        value = getattr(measure, name)
        if value is not None and value < 1:
            raise ContractError(f"bench: {name} is {value}, needs at least 1")
    config = Glm5Config.from_pretrained(path)
    length = measure.prompt_tokens + measure.new_tokens
    if length > config.max_position_embeddings:
        raise CapacityError(
            f"bench: prompt and new tokens are {length}, needs at most {config.max_position_embeddings}, "
            "the model's max_position_embeddings"
        )
    if json_path is not None and not json_path.parent.is_dir():
        raise ContractError(f"bench: folder of {json_path} is missing, needs one that exists")
    _set_threads(measure.threads)
    with chosen(backends), torch.no_grad():
        model = Glm5ForCausalLM.from_pretrained(path, dtype=measure.dtype, device=measure.device)
        results = run(model, measure)
        report = _report(path, model, measure, results)
    _show(console, [Comparison(report, 1.0, None, None)], None)
    if json_path is not None:
        report.save(json_path)


def compare_reports(console: Console, paths: Sequence[Path], prices_path: Path | None) -> None:
    """Print reports side by side, with costs when there is a prices file; see glm5sdk.perf.report for the errors."""
    prices = None if prices_path is None else read_prices(prices_path)
    _show(console, compare([read_report(path) for path in paths], prices), prices)


def run(model: Glm5ForCausalLM, measure: Measure) -> Results:
    """Prefill and greedy decoding of random prompts, `repeats` times after a short one that warms up."""
    generator = torch.Generator().manual_seed(0)
    shape = (measure.batch, measure.prompt_tokens)
    prompts = torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)
    _run_once(model, prompts[:, : min(measure.prompt_tokens, 16)], 2)
    firsts, steps = [], []
    for _ in range(measure.repeats):
        first, later = _run_once(model, prompts, measure.new_tokens)
        firsts.append(first)
        steps += later
    first, step = statistics.median(firsts), statistics.median(steps)
    late = sorted(steps)[min(len(steps) - 1, int(0.95 * len(steps)))]
    return Results(measure.batch * measure.prompt_tokens / first, measure.batch / step, first, step, late)


def _run_once(model: Glm5ForCausalLM, prompts: Tensor, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and of each step after it."""
    batch, length = prompts.shape
    cache = model.make_cache(batch, length + new_tokens)
    begin = _now(model)
    ids = _prefill(model, prompts, cache)
    times = [_now(model)]
    for _ in range(new_tokens):
        ids = model(ids, cache=cache)[:, -1].argmax(-1, keepdim=True)
        times.append(_now(model))
    return times[0] - begin, [b - a for a, b in itertools.pairwise(times)]


def _prefill(model: Glm5ForCausalLM, prompts: Tensor, cache: LatentCache) -> Tensor:
    """The first new token of each request, [B, 1]."""
    batch, length = prompts.shape
    each = max(1, CHUNK // batch)
    for start in range(0, length, each):
        chunk = prompts[:, start : start + each]
        step = [chunk.shape[1]] * batch
        hidden_TN = model.hidden_states(chunk.reshape(-1), model.context(cache.batch(step), cache))
        cache.advance(step)
    last_BN = hidden_TN.view(batch, -1, hidden_TN.shape[-1])[:, -1]
    return model.logits(last_BN.contiguous()).argmax(-1, keepdim=True)


def _now(model: Glm5ForCausalLM) -> float:
    wait_for_device(model.device.type)
    return time.perf_counter()


def _set_threads(count: int | None) -> None:
    if count is None:
        return
    torch.set_num_threads(count)
    for backend in glm5sdk.backends().values():
        if backend.threads is not None:
            backend.threads(count)


def _report(path: Path, model: Glm5ForCausalLM, measure: Measure, results: Results) -> Report:
    config = json.dumps(model.config.to_dict(), sort_keys=True)
    workload = Workload(
        path.resolve().name,
        hashlib.sha256(config.encode()).hexdigest()[:16],
        str(model.dtype).removeprefix("torch."),
        measure.batch,
        measure.prompt_tokens,
        measure.new_tokens,
    )
    found = {
        name: {"device": b.device.name, "threads": b.threads() if b.threads is not None else None}
        for name, b in glm5sdk.backends().items()
        if not b.reason and b.device is not None
    }
    device = model.device.type
    names = [b.device.name for b in glm5sdk.backends().values() if b.device is not None and b.device.type == device]
    machine = {
        "device": device,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "glm5sdk": glm5sdk.__version__,
        "backends": found,
    }
    return Report(measure.hardware or (names[0] if names else device), workload, results, machine)


def _show(console: Console, columns: Sequence[Comparison], prices: Prices | None) -> None:
    w = columns[0].report.workload
    title = f"{w.model}, {w.dtype}, batch {w.batch}, {w.prompt_tokens} prompt and {w.new_tokens} new tokens"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("")
    for column in columns:
        table.add_column(Text(column.report.hardware), justify="right")  # no markup: brackets belong to the name
    results = [column.report.results for column in columns]
    table.add_row("prefill, tokens/s", *(f"{r.prefill_tokens_per_second:.1f}" for r in results))
    table.add_row("decode, tokens/s", *(f"{r.decode_tokens_per_second:.1f}" for r in results))
    table.add_row("first token, ms", *(f"{r.first_token_seconds * 1e3:.1f}" for r in results))
    table.add_row("between tokens, ms", *(f"{r.token_seconds * 1e3:.2f}" for r in results))
    table.add_row("between tokens, 95 %, ms", *(f"{r.token_seconds_p95 * 1e3:.2f}" for r in results))
    if len(columns) > 1:
        table.add_row("decode against the first", *(f"{column.speedup:.2f}x" for column in columns))
    if prices is not None:
        currency = escape(prices.currency)
        table.add_row(f"{currency} an hour", *(f"{prices.of(c.report.hardware):.4g}" for c in columns))
        table.add_row(f"{currency} per million prompt tokens", *(f"{c.prompt_cost:.4g}" for c in columns))
        table.add_row(f"{currency} per million new tokens", *(f"{c.new_cost:.4g}" for c in columns))
    console.print(table)
