"""Serving on this processor: the engine beside transformers and llama.cpp, its switches on and off, and its latencies.

1. Sixteen requests at once, prompts and answers of mixed lengths, on the same weights. Every program is a child
   process and gives its tokens first: in float32 they must be those of glm5sdk, token for token, or it is not timed; in
   bfloat16 a program is timed when its float32 tokens were right (or its texts begin alike, if it has no float32).
2. Each switch of the engine on and off, in turns, on traffic that it is for; outputs are compared.
3. Requests that come at a rate: seconds to the first token and between tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peers.traffic import Request, mixed, same_tokens
from rig.features import Feature, features, longest_pause, make_engine
from rig.machine import facts, set_threads
from rig.open_loop import open_loop, percentile, poisson, timed_tokens, tokens_of
from rig.race import WRONG, Program, race
from rig.serving_model import CONFIG, QUICK
from rig.small_model import make_checkpoint
from rig.table import machine_line, markdown_table, save_json, seconds, text_table

from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.serve.admission import DynamicBatching

HERE = Path(__file__).resolve().parent
DTYPES = ("float32", "bfloat16")
TARGET = 5.0  # times transformers' best


def cell(program: Program, dtype: str) -> str:
    return f"{program.rate[dtype]:.1f}" if dtype in program.rate else "-"


def switch(feature: Feature, model: Glm5ForCausalLM, repeats: int) -> dict[str, Any]:
    """Tokens a second with the switch on and off, taking turns."""
    engines = {"on": make_engine(model, feature.on), "off": make_engine(model, feature.off)}
    took: dict[str, list[float]] = {name: [] for name in engines}
    different = 0
    for turn in range(repeats + 1):
        requests = feature.traffic(turn)
        answers = []
        for name, llm in engines.items():
            tokens, spent = timed_tokens(llm, requests)
            answers.append(tokens)
            took[name].append(spent)
        different += len(requests) - same_tokens(*answers)
    useful = sum(r.new_tokens for r in feature.traffic(0))
    rates = {name: useful / statistics.median(values[1:]) for name, values in took.items()}
    row = {"feature": feature.name, **rates, "different": different, "note": feature.note(engines["on"])}
    row["wrong"] = bool(feature.exact and different)
    for llm in engines.values():
        llm.shutdown()
    return row


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, help="of every program; all usable processors by default")
    parser.add_argument("--requests", type=int, default=16, help="at once (16)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each; the median counts (3)")
    parser.add_argument(
        "--share", type=float, default=0.5, help="of prompts of 8 to 512 and answers of 16 to 128 (0.5)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests: does it all work?")
    parser.add_argument(
        "--only", default="", help="programs of the first part whose name contains this, beside glm5sdk"
    )
    parser.add_argument("--parts", default="123", help="which of the three parts (123)")
    parser.add_argument(
        "--trained", type=Path, default=HERE.parent / "demo" / "checkpoint", help="model with trained MTP"
    )
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".venv-peers", help="made by peers/setup.sh")
    parser.add_argument("--limit", type=int, default=900, help="seconds for one program (900)")
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--markdown", type=Path, help="save the tables here")
    options = parser.parse_args()
    threads = set_threads(options.threads)
    torch.set_grad_enabled(False)
    machine = facts()
    print(machine_line(machine), flush=True)
    config, share = (QUICK, 0.12) if options.quick else (CONFIG, options.share)
    count, repeats = (4, 1) if options.quick else (options.requests, options.repeats)
    requests = mixed(count, config.vocab_size, share)
    programs = [
        Program("glm5sdk", "serve_glm5sdk.py", sys.executable),
        Program("transformers, padded batch", "serve_transformers.py", sys.executable, "padded"),
        Program("transformers, padded batch, expert loop", "serve_transformers.py", sys.executable, "padded:eager"),
        Program("transformers, one by one", "serve_transformers.py", sys.executable, "single"),
        Program("transformers, continuous batching", "serve_transformers.py", sys.executable, "continuous"),
        Program("transformers accelerated, padded batch", "serve_transformers.py", sys.executable, "accelerated"),
        Program("llama.cpp, continuous batching", "serve_llama.py", str(options.peers / "bin" / "python")),
    ]
    if options.quick:
        programs = [programs[0], programs[1], programs[5], programs[6]]
    programs = programs[:1] + [p for p in programs[1:] if options.only in p.name]
    switches: list[dict[str, Any]] = []
    pauses: dict[str, float] = {}
    latencies: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_checkpoint(folder, config)
        if "1" in options.parts:
            for dtype in DTYPES:
                race(programs, folder, threads, dtype, requests, repeats, options.limit)
                print(dtype, {p.name: p.why.get(dtype) or cell(p, dtype) for p in programs}, flush=True)
        model = Glm5ForCausalLM.from_pretrained(folder, "float32")
        trained = Glm5ForCausalLM.from_pretrained(options.trained, "float32") if options.trained.is_dir() else None
        for feature in features(config.vocab_size, count, share) if "2" in options.parts else ():
            if feature.trained and trained is None:
                print(f"{feature.name}: no checkpoint with a trained MTP layer at --trained", flush=True)
                continue
            if feature.trained and trained is not None:
                small = [f for f in features(trained.config.vocab_size, count, share) if f.name == feature.name]
                feature = small[0]
            switches.append(switch(feature, trained if feature.trained and trained is not None else model, repeats))
            print(switches[-1], flush=True)
        if "3" in options.parts:
            latencies = at_rates(model, mixed(2 * count, config.vocab_size, share), share)
            pauses = longest_pause(model, count, share)
    report(options, machine, config.to_dict(), programs, switches, latencies, pauses)
    wrong = [r["feature"] for r in switches if r["wrong"]] + [
        p.name for p in programs if p.why.get("float32", "").startswith(WRONG)
    ]
    if wrong:
        sys.exit(f"wrong tokens: {', '.join(wrong)}")


def at_rates(model: Glm5ForCausalLM, requests: list[Request], share: float) -> list[dict[str, Any]]:
    """Latencies at a quarter, a half and three quarters of what the engine serves when all requests are there."""
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": max(16, int(512 * share))}
    llm = make_engine(model, settings)
    tokens_of(llm, requests[:2])
    full = len(requests) / timed_tokens(llm, requests)[1]
    batching = make_engine(model, {**settings, "admission": DynamicBatching(16, (4, 8, 16), max_queue_delay=2 / full)})
    rows = []
    for load, queue, engine in (
        *((load, "first come", llm) for load in (0.25, 0.5, 0.75)),
        (0.5, "dynamic batching", batching),
    ):
        found = open_loop(engine, requests, poisson(len(requests), load * full))
        row = {"load": load, "queue": queue, "rate": load * full, "tokens_per_second": found.tokens / found.seconds}
        for name, values in (("first", found.first), ("between", found.between)):
            row |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
        rows.append(row)
        print(row, flush=True)
    for engine in (llm, batching):
        engine.shutdown()
    return rows


def report(
    options: Any,
    machine: dict[str, Any],
    config: dict[str, Any],
    programs: list[Program],
    switches: list[dict[str, Any]],
    latencies: list[dict[str, Any]],
    pauses: dict[str, float],
) -> None:
    """Tables to the screen, and to files when asked for."""
    ours = programs[0].rate
    plain = [p for p in programs if p.name.startswith("transformers,")]
    best = {d: max((p.rate[d] for p in plain if d in p.rate), default=None) for d in DTYPES}
    tables = []
    if "1" in options.parts:
        rows = [
            [p.name, *(x for d in DTYPES for x in (cell(p, d), ratio(ours.get(d), p.rate.get(d)), p.same.get(d, "-")))]
            for p in programs
        ]
        head = ["new tokens/s", *(x for d in DTYPES for x in (d, "we are", "same tokens"))]
        tables.append((head, rows))
    if switches:
        rows = [
            [r["feature"], f"{r['on']:.1f}", f"{r['off']:.1f}", ratio(r["on"], r["off"]),
             "WRONG" if r["wrong"] else f"{r['different']} differ", r["note"]]
            for r in switches
        ]  # fmt: skip
        tables.append((["float32, new tokens/s", "on", "off", "on/off", "outputs", ""], rows))
    if latencies:
        names = ("first_p50", "first_p99", "between_p50", "between_p99")
        rows = [
            [
                f"{r['load']:.0%} ({r['rate']:.2f}/s), {r['queue']}",
                *(seconds(r[n]) for n in names),
                f"{r['tokens_per_second']:.1f}",
            ]
            for r in latencies
        ]
        head = ["load", "first token p50", "p99", "between tokens p50", "p99", "tokens/s"]
        tables.append((head, rows))
    verdict = [
        f"{d}: {ours[d] / top:.1f}x transformers' best (target {TARGET:.0f}x)"
        for d, top in best.items()
        if top is not None and d in ours
    ]
    notes = verdict + [f"{p.name}: {d}: {why}" for p in programs for d, why in p.why.items()]
    notes += [
        f"longest pause of a running answer when a long prompt comes, {n}: {seconds(v)}" for n, v in pauses.items()
    ]
    for head, rows in tables:
        print("\n" + text_table(head, rows))
    print(*notes, sep="\n")
    if options.markdown:
        parts = [
            machine_line(machine),
            *(markdown_table(h, r) for h, r in tables),
            "\n".join(f"- {n}" for n in notes),
        ]
        options.markdown.write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    if options.json:
        # Where a program lies is this machine's business.
        found = [{k: v for k, v in vars(p).items() if k != "python"} for p in programs]
        content = {
            "machine": machine,
            "config": config,
            "programs": found,
            "switches": switches,
            "latencies": latencies,
        }
        save_json(options.json, json.loads(json.dumps(content)))


def ratio(mine: float | None, other: float | None) -> str:
    return "-" if mine is None or other is None else f"{mine / other:.2f}x"


if __name__ == "__main__":
    main()
