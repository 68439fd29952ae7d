"""Ops that decide GLM-5's speed, on this processor: against the best torch composition and under the roofline.

Every row is checked first and not timed while it is wrong. Torch's side is the best of the compositions written in
rig/, each eager and, where it compiles, through torch.compile; all are measured in turn, in the same minutes, on
inputs that have left the caches. The roofline is this machine's own, measured in the same run, again before every op:
memory read by all threads, and the instruction that the implementation's level multiplies with. The best of those
measurements counts, so a share printed on the way may be higher than in the table at the end.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rig import attention, products
from rig.case import Case
from rig.machine import facts, set_threads
from rig.table import against, machine_line, markdown_table, save_json, seconds, text_table
from rig.timing import interleaved

from glm5sdk.perf import Ceilings, achieved, measure_ceilings
from glm5sdk.registry import Cost, use

# Targets were set for two threads of a Zen 4 (AVX-512 with VNNI and BF16, no AMX): speed against torch, share of roof.
HEAD = ("op", "size", "ours", "time", "torch", "best is", "ratio (target)", "roof (target)", "bound")


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """(name to filter by, maker); made one at a time, as some need a gigabyte."""
    for batch, speed, roof in ((1, 2.0, 0.80), (4, 2.0, 0.75), (16, 4.0, 0.75)):
        yield (
            f"sparse_flash_attention decode {batch}",
            lambda b=batch, s=speed, r=roof: attention.attention_decode(b, s, r),
        )
    yield "topk_indexer decode 32k", lambda: attention.indexer_decode(32768, 3.5, 0.88, 9.0)
    yield "topk_indexer decode 128k", lambda: attention.indexer_decode(131072, 3.0, 0.85, 16.0)
    yield "topk_indexer prefill", lambda: attention.indexer_prefill(512, 8192, 4.5, 0.85)
    experts: list[products.Experts] = []
    targets = {
        "bf16": {1: (2.2, 0.80), 16: (2.2, 0.75), 512: (1.3, 0.78)},
        "w8a8": {1: (2.0, 0.70), 16: (3.0, 0.75), 512: (1.8, 0.70)},
    }
    for kind, rows in targets.items():
        for tokens, (speed, roof) in rows.items():

            def make(t: int = tokens, k: str = kind, s: float = speed, r: float = roof) -> Case:
                if not experts:
                    experts.append(products.Experts())
                return experts[0].case(t, k, s, r)

            yield f"moe_experts {kind} {tokens}", make
    experts_done = experts.clear
    for tokens, speed, roof in ((1, 2.4, 0.78), (16, 2.5, 0.75), (512, 1.4, 0.78)):

        def make_mla(t: int = tokens, s: float = speed, r: float = roof) -> Case:
            experts_done()
            return products.mla_preprocess(t, s, r)

        yield f"mla_preprocess {tokens}", make_mla
    for tokens, speed, roof in ((4, 1.6, 0.75), (512, 1.0, 0.92)):
        yield f"linear {tokens}", lambda t=tokens, s=speed, r=roof: products.linear(t, s, r)


def competitors(case: Case, compiling: bool) -> tuple[dict[str, Callable[[int], Any]], list[str]]:
    """Torch's runners by name, and remarks on those that cannot run here."""
    runners, remarks = {}, []
    for name, function in case.eager.items():
        forms = {name: function}
        if compiling and name in case.compiled:
            forms[f"{name}, compiled"] = torch.compile(function, dynamic=False)
        for form, f in forms.items():
            try:
                f(*case.torch_inputs[0])
            except Exception as error:  # noqa: BLE001  a composition that torch cannot run here is no competitor
                remarks.append(
                    f"{case.op} {case.preset}: torch's {form} cannot run: {str(error).splitlines()[0][:120]}"
                )
                continue
            runners[form] = lambda n, f=f: f(*case.torch_inputs[n])
    return runners, remarks


def measure(case: Case, caps: list[str], levels: set[str], repeats: int, compiling: bool) -> list[dict[str, Any]]:
    """One result for each instruction level asked for."""
    ours: dict[str, str] = {}
    runners: dict[str, Callable[[int], Any]] = {}
    results = []
    for cap in caps:
        with use(f"cpu.{cap}") if cap else nullcontext():
            chosen, inner = case.implementation()
            level = inner.removeprefix("cpu.")
            name = chosen if chosen == inner else f"{chosen} on {inner}"
            row = {"op": case.op, "preset": case.preset, "cap": cap, "implementation": name, "kind": case.kind}
            if level not in levels:
                results.append(row | {"refused": f"no kernel takes it yet: its products run on the {inner}"})
                continue
            if name in ours.values():
                continue  # the cap changes nothing
            if red := case.check(case.ours(0)):
                results.append(row | {"refused": f"wrong, so not timed: {red}"})
                continue
        ours[f"ours {cap}"] = name
        runners[f"ours {cap}"] = _capped(case, cap)
        results.append(row | {"runner": f"ours {cap}", "level": level})
    if not runners:
        return results
    peers, remarks = competitors(case, compiling)
    times = interleaved({**runners, **peers}, len(case.inputs), repeats)
    best = min(peers, key=lambda name: times[name]) if peers else None
    for row in results:
        if "runner" not in row:
            continue
        took = times[row.pop("runner")]
        row |= {"seconds": took, "cost": asdict(case.cost), "target_roof": case.roof, "remarks": remarks}
        if best is not None:
            row |= {"torch": {n: times[n] for n in peers}, "best": best, "ratio": times[best] / took}
            row["target_ratio"] = case.speed
        row["against"] = {n: {"ratio": times[n] / took, "target": t} for n, t in case.against.items() if n in peers}
    return results


def place(row: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """The result with its place under the roofline."""
    if "refused" in row:
        return row
    cost, peaks = Cost(**row["cost"]), ceilings.peaks_of(row["level"], row["kind"])
    under = achieved(cost, row["seconds"], peaks, "f32")
    return row | {
        "roof": under.share,
        "bound": under.bound,
        "flops": under.flops,
        "bandwidth": under.bandwidth,
    }


def _capped(case: Case, cap: str) -> Callable[[int], Any]:
    def run(n: int) -> Any:
        with use(f"cpu.{cap}") if cap else nullcontext():
            return case.ours(n)

    return run


def cells(row: dict[str, Any]) -> list[str]:
    """A result as columns of the table."""
    name = row["implementation"] + (f" (cap {row['cap']})" if row["cap"] else "")
    if "refused" in row:
        return [row["op"], row["preset"], name, row["refused"], "-", "-", "-", "-", "-"]
    best = row.get("best")
    ratio = against(row.get("ratio"), row.get("target_ratio"), "{:.2f}x")
    for peer, one in row["against"].items():
        ratio += f"; {peer} {against(one['ratio'], one['target'], '{:.1f}x')}"
    return [
        row["op"], row["preset"], name, seconds(row["seconds"]), seconds(row["torch"][best]) if best else "-",
        best or "-", ratio, against(row["roof"], row["target_roof"], "{:.0%}"), row["bound"],
    ]  # fmt: skip


def main() -> None:
    """Parse, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this, such as `moe_experts w8a8`")
    parser.add_argument("--levels", nargs="*", default=[], help="also measure under these caps, such as avx512_bf16")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved samples of each competitor (7)")
    parser.add_argument("--threads", type=int, help="of torch and of the kernels; all usable processors by default")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--markdown", type=Path, help="save the table here")
    options = parser.parse_args()
    set_threads(options.threads)
    machine, ceilings = facts(), measure_ceilings()
    print(machine_line(machine, ceilings.bandwidth), flush=True)
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, make in cases():
            if options.only not in name:
                continue
            case = make()
            measure_ceilings.cache_clear()
            ceilings = ceilings.best_with(measure_ceilings())
            caps = ["", *options.levels]
            for row in measure(case, caps, set(ceilings.flops), options.repeats, not options.no_compile):
                results.append(row)
                print("  ".join(cells(place(row, ceilings))), flush=True)
            del case
            gc.collect()
    results = [place(row, ceilings) for row in results]
    rows = [cells(row) for row in results]
    print("\n" + text_table(HEAD, rows))
    for level, rates in ceilings.flops.items():
        print(f"  {level:<12} " + "  ".join(f"{kind} {rate / 1e9:.0f} G/s" for kind, rate in rates.items()))
    print(f"  memory       {ceilings.bandwidth / 1e9:.1f} GB/s")
    note = "Targets in brackets were set for two threads of a Zen 4; a star marks what falls short of them."
    print(note)
    for remark in dict.fromkeys(r for row in results for r in row.get("remarks", ())):
        print(remark)
    if options.markdown:
        text = f"{machine_line(machine, ceilings.bandwidth)}. {note}\n\n{markdown_table(HEAD, rows)}\n"
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        save_json(options.json, {"machine": machine, "ceilings": ceilings.to_dict(), "rows": results})


if __name__ == "__main__":
    main()
