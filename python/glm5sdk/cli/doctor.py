"""`glm5 doctor`: what is here, what is not and why, and whether the basics compute."""

from __future__ import annotations

import os
import platform
import sys

import torch
from rich.console import Console
from rich.table import Table

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.config import BACKENDS_VARIABLE, LOG_VARIABLE, STRICT_VARIABLE
from glm5sdk.registry.select import current_use

__all__ = ["report"]


def report(console: Console) -> bool:
    """Print the report; False when a check fails."""
    _versions(console)
    _backends(console)
    return _self_test(console)


def _versions(console: Console) -> None:
    table = Table(title="glm5sdk doctor", show_header=False, title_justify="left")
    table.add_row("glm5sdk", glm5sdk.__version__)
    table.add_row("python", f"{sys.version.split()[0]} on {platform.machine()}")
    table.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    table.add_row("processors", f"{usable} usable")
    for variable in (BACKENDS_VARIABLE, STRICT_VARIABLE, LOG_VARIABLE):
        table.add_row(variable, os.environ.get(variable, "not set"))
    table.add_row("chosen", ", ".join(current_use()) or "by priority")
    console.print(table)


def _backends(console: Console) -> None:
    table = Table(title="backends", title_justify="left")
    for column in ("name", "state", "device", "ops", "variants"):
        table.add_column(column)
    for name, backend in glm5sdk.backends().items():
        device = backend.device.name if backend.device else "-"
        state = f"[red]cannot run: {backend.reason}[/]" if backend.reason else "ready"
        variants = sorted({impl.variant for impl in backend.impls})
        table.add_row(name, state, device, str(len({impl.op for impl in backend.impls})), ", ".join(variants))
    table.add_row("reference", "ready", "any", str(len(ops.__all__)), "plain torch, always there")
    console.print(table)
    if not glm5sdk.backends():
        console.print("No backend wheel is installed; everything runs on the reference. Try: pip install glm5sdk-cpu")


def _self_test(console: Console) -> bool:
    """One small op on everything that claims to be ready, against the reference."""
    x = torch.linspace(-1, 1, 3 * 37).view(3, 37)
    weight = torch.linspace(0.5, 1.5, 37)
    want = ops.rms_norm.reference(x, weight, 1e-5)
    good = True
    for name, backend in glm5sdk.backends().items():
        if backend.reason or backend.device is None or backend.device.type != "cpu":
            continue
        with glm5sdk.use(name):
            chosen = ops.rms_norm.explain(x, weight, 1e-5).chosen
            error = float((ops.rms_norm(x, weight, 1e-5) - want).abs().max())
        passed = error < 1e-5
        good = good and passed
        console.print(f"self-test {name}: rms_norm on {chosen} {'is right' if passed else f'is off by {error}'}")
    return good
