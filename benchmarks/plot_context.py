"""Does decoding slow down with the context? Speed against context, and the indexer's share of a step, as a PNG.

Past index_topk keys attention costs the same at any length; what grows is the indexer's search. Our caches are filled
with random rows, so that a long context need not be prefilled; other programs run their prompts, so their lines end at
`--peer-context`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu_model import Program
from peers.protocol import Workload
from rig.machine import facts, set_threads
from rig.small_model import CONFIG, make_checkpoint
from rig.table import machine_line, save_json, text_table

HERE = Path(__file__).resolve().parent
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
STEPS = 8


def points(programs: list[Program], folder: Path, threads: int, contexts: list[int], most: int, limit: int) -> Any:
    """For each program {context: seconds a step}; for ours also {context: share of the indexer}."""
    times: dict[str, dict[int, float]] = {}
    shares: dict[int, float] = {}
    for number, program in enumerate(programs):
        mine = number == 0
        found = times.setdefault(program.name, {})
        for context in contexts:
            if not mine and context > most:
                continue
            work = Workload("indexer" if mine else "decode", context, steps=STEPS, random_fill=mine)
            ((value, why),) = program.run(folder, threads, [work], limit)
            if value is None:
                print(f"{program.name}, context {context}: {why}", flush=True)
                break  # a longer one would fail in the same way
            found[context] = value[0] if mine else value
            if mine:
                shares[context] = value[1] / value[0]
            print(f"{program.name}, context {context}: {found[context] * 1e3:.1f} ms", flush=True)
    return times, shares


def draw(path: Path, times: dict[str, dict[int, float]], shares: dict[int, float], title: str) -> None:
    """Three panels: tokens a second, milliseconds a token, and the share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, latency, share) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for name, found in times.items():
        if found:
            speed.plot(list(found), [1 / t for t in found.values()], marker="o", label=name)
            latency.plot(list(found), [t * 1e3 for t in found.values()], marker="o", label=name)
    share.plot(list(shares), [100 * s for s in shares.values()], marker="o", color="tab:green")
    for axes, label in ((speed, "tokens/s"), (latency, "ms per token"), (share, "indexer's share of a step, %")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(CONTEXTS, [f"{c / 1024:g}k" for c in CONTEXTS])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.axvline(CONFIG.index_topk, color="grey", linestyle=":", label=f"index_topk = {CONFIG.index_topk}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Parse, measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("context.png"), help="the picture (context.png)")
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--threads", type=int, help="of every program; all usable processors by default")
    parser.add_argument("--checkpoint", type=Path, help="folder to keep the model in; a temporary one by default")
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".venv-peers", help="made by peers/setup.sh")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS), help="of the decode steps")
    parser.add_argument("--peer-context", type=int, default=8192, help="longest prompt of another program (8192)")
    parser.add_argument("--only-ours", action="store_true", help="leave the other programs out")
    parser.add_argument("--limit", type=int, default=900, help="seconds for one point of one program (900)")
    options = parser.parse_args()
    threads = set_threads(options.threads)
    machine = facts()
    programs = [Program("glm5sdk", "run_glm5sdk.py", sys.executable)]
    if not options.only_ours:
        programs += [
            Program("transformers", "run_transformers.py", sys.executable),
            Program("llama.cpp", "run_llama.py", str(options.peers / "bin" / "python")),
        ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.checkpoint or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        make_checkpoint(folder)
        times, shares = points(programs, folder, threads, options.contexts, options.peer_context, options.limit)
    head = ["context", *(f"{name}, ms" for name in times), "indexer"]
    rows = [
        [str(c), *(f"{found[c] * 1e3:.1f}" if c in found else "-" for found in times.values()),
         f"{shares[c]:.0%}" if c in shares else "-"]
        for c in options.contexts
    ]  # fmt: skip
    print(text_table(head, rows))
    draw(options.out, times, shares, f"Decoding, batch 1, bf16; {machine_line(machine)}")
    if options.json:
        save_json(options.json, {"machine": machine, "seconds": times, "indexer": shares})


if __name__ == "__main__":
    main()
