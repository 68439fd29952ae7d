"""A whole GLM-5 model on this processor: glm5sdk beside transformers and llama.cpp, same weights, same run.

Every program is a child process of its own and must first give the logits that glm5sdk gives: a program that computes
something else is not timed. One that is not installed is reported as absent, with the reason;
benchmarks/peers/setup.sh installs llama.cpp.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers.protocol import Workload, as_arguments, parse_line
from rig.machine import facts, set_threads
from rig.small_model import CONFIG, make_checkpoint
from rig.table import machine_line, markdown_table, save_json, text_table

HERE = Path(__file__).resolve().parent
AGREE_TOKENS = 128  # fewer than index_topk: with random weights, near ties among selected keys would differ
# Cosine of the logits of the last position. Two right programs reach 0.99 in bf16: with random weights many tokens lie
# between two experts, and a rounding decides. Another rope, norm or scale stays far below.
AGREE = 0.97

ROWS: dict[str, Workload] = {
    "prefill 512, tokens/s": Workload("prefill", 512),
    "prefill 2048, tokens/s": Workload("prefill", 2048),
    "prefill 4096, tokens/s": Workload("prefill", 4096),
    "decode, batch 1, context 512, tokens/s": Workload("decode", 512),
    "decode, batch 1, context 2048, tokens/s": Workload("decode", 2048),
    "decode, batch 8, context 2048, tokens/s": Workload("decode", 2048, batch=8),
    "decode, batch 1, context 2048, int8, tokens/s": Workload("decode", 2048, int8=True),
}
MEMORY = "memory above weights, prefill 4096, MiB"


@dataclass
class Program:
    """One of those compared.

    Attributes:
        name: as printed.
        script: the child's, in peers/.
        python: interpreter that has it.
        option: passed on to the child.
        values, reasons: by row; a reason stands where there is no value.
        absent: why it could not run at all.
    """

    name: str
    script: str
    python: str
    option: str = ""
    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    absent: str = ""

    def run(self, checkpoint: Path, threads: int, workloads: list[Workload], limit: int) -> list[tuple[Any, str]]:
        """(value, reason) of each workload, in order; sets `absent` when the child said why it cannot be."""
        command = [
            self.python, str(HERE / "peers" / self.script), "--checkpoint", str(checkpoint), "--threads", str(threads),
            "--workloads", as_arguments(workloads), "--option", self.option,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        results: list[tuple[Any, str]] = []
        ending = ""
        try:
            child = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
            output, ending = child.stdout, _last_words(child.stderr, child.returncode)
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            ending = f"took more than {limit} s"
        except OSError as error:
            output, ending = "", f"absent: {error}"
        for line in output.splitlines():
            found = parse_line(line)
            if found is None:
                continue
            if "about" in found:
                self.about = found["about"]
            else:
                results.append((found["value"], found["why"]))
        if ending.startswith("absent: "):
            self.absent = ending.removeprefix("absent: ")
        return results + [(None, ending or "stopped")] * (len(workloads) - len(results))


def _last_words(stderr: str, status: int) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    return (lines[-1][:160] if lines else f"ended with {status}") if status else ""


def agreement(mine: list[float], theirs: list[float]) -> float:
    """Cosine of two rows of logits; 0 when they have different lengths."""
    if len(mine) != len(theirs):
        return 0.0
    return float(torch.nn.functional.cosine_similarity(torch.tensor(mine), torch.tensor(theirs), dim=0))


def measure(programs: list[Program], checkpoint: Path, threads: int, rows: dict[str, Workload], limit: int) -> None:
    """Logits first, then what was asked for, then memory in a fresh process."""
    check = Workload("logits", AGREE_TOKENS)
    expected: list[float] | None = None
    for program in programs:
        print(f"{program.name}: logits", flush=True)
        ((logits, why),) = program.run(checkpoint, threads, [check], limit)
        if logits is None:
            program.absent = program.absent or why
        elif expected is None:
            expected = logits
        else:
            cosine = agreement(expected, logits)
            program.about["cosine"] = cosine
            if cosine < AGREE:
                program.absent = f"its logits are not glm5sdk's (cosine {cosine:.3f}, needs {AGREE}), so not timed"
        if program.absent:
            print(f"  not measured: {program.absent}", flush=True)
            continue
        about = program.about
        for name, workload in rows.items():
            ((value, why),) = program.run(checkpoint, threads, [workload], limit)
            if value is None:
                program.reasons[name] = why
            else:
                program.values[name] = value if workload.kind == "prefill" else workload.batch / value
            print(f"  {name}: {_cell(program, name)}", flush=True)
        ((value, why),) = program.run(checkpoint, threads, [Workload("memory", 4096)], limit)
        if value is None:
            program.reasons[MEMORY] = why
        else:
            program.values[MEMORY] = value / 2**20
        print(f"  {MEMORY}: {_cell(program, MEMORY)}", flush=True)
        program.about = about | program.about


def _cell(program: Program, row: str) -> str:
    if program.absent:
        return "absent"
    return f"{program.values[row]:.1f}" if row in program.values else program.reasons.get(row, "-")


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, help="of every program; all usable processors by default")
    parser.add_argument("--checkpoint", type=Path, help="folder to keep the model in; a temporary one by default")
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".venv-peers", help="made by peers/setup.sh")
    parser.add_argument("--backend", default="", help="cap of glm5sdk's side, such as cpu.avx512_bf16")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--limit", type=int, default=900, help="seconds for one row of one program (900)")
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--markdown", type=Path, help="save the table here")
    options = parser.parse_args()
    threads = set_threads(options.threads)
    machine = facts()
    print(machine_line(machine), flush=True)
    programs = [
        Program("glm5sdk", "run_glm5sdk.py", sys.executable, options.backend),
        Program("transformers", "run_transformers.py", sys.executable),
        Program("transformers, expert loop", "run_transformers.py", sys.executable, "eager"),
        Program("llama.cpp (glm-dsa)", "run_llama.py", str(options.peers / "bin" / "python")),
    ]
    missing = "kt-kernel: absent: its wheel brings a CUDA build of torch along, also for a CPU"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.checkpoint or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        make_checkpoint(folder)
        rows = {name: workload for name, workload in ROWS.items() if options.only in name}
        measure(programs, folder, threads, rows, options.limit)
    head = ["", *(p.name for p in programs)]
    table = [[name, *(_cell(p, name) for p in programs)] for name in [*rows, MEMORY]]
    notes = [missing, *(f"{p.name}: absent: {p.absent}" for p in programs if p.absent)]
    notes += [f"{p.name}: {n}: {why}" for p in programs for n, why in p.reasons.items()]
    notes += [f"{p.name}: {p.about}" for p in programs if p.about]
    print("\n" + text_table(head, table), *notes, sep="\n")
    if options.markdown:
        lines = [machine_line(machine), "", markdown_table(head, table), "", *(f"- {note}" for note in notes)]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.json:
        # Where a program lies is this machine's business.
        found = [{name: value for name, value in vars(p).items() if name != "python"} for p in programs]
        save_json(options.json, {"machine": machine, "config": CONFIG.to_dict(), "programs": found})


if __name__ == "__main__":
    main()
