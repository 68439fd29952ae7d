"""transformers beside itself: GlmMoeDsaForCausalLM as it is, and after glm5sdk.integrations.transformers.accelerate.

Same class, same weights, same `generate`, same run; the two take turns. Before anything is timed the accelerated one
must give the same logits past index_topk and, in float32, the same greedy tokens for a left-padded batch.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peers.protocol import token_ids
from rig.machine import facts, set_threads
from rig.serving_model import CONFIG
from rig.small_model import make_checkpoint
from rig.table import machine_line, markdown_table, save_json, seconds, text_table
from rig.timing import interleaved
from torch import Tensor
from transformers import DynamicCache, GlmMoeDsaForCausalLM

from glm5sdk.integrations.transformers import accelerate

HEAD = ("dtype", "work", "transformers", "accelerated", "ratio")
FAR = {"float32": 1e-4, "bfloat16": 0.1}  # logits of scale 1: largest difference, and one minus the cosine
STEPS = 16  # of a decode sample; a quarter with --quick


def make_pair(path: Path, dtype: str, experts: str) -> tuple[Any, Any]:
    """(the model as it is, its accelerated copy); the quickest of transformers' own experts by default."""
    plain = GlmMoeDsaForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    quick = copy.deepcopy(plain)
    plain.set_experts_implementation(experts)
    accelerate(quick)
    return plain, quick


def prompts(batch: int, length: int) -> Tensor:
    """i64 [batch, length], far from regular."""
    return torch.tensor([token_ids(length, CONFIG.vocab_size, request) for request in range(batch)])


def check(plain: Any, quick: Any, dtype: str) -> str:
    """Why they differ, or ""."""
    ids = prompts(2, CONFIG.index_topk + 64)
    want, got = (model(ids).logits.double() for model in (plain, quick))
    if dtype != "float32":
        cosine = float(torch.nn.functional.cosine_similarity(want.flatten(), got.flatten(), dim=0))
        return "" if 1 - cosine < FAR[dtype] else f"cosine of logits is {cosine:.4f}"
    if (off := float((want - got).abs().max())) > FAR[dtype]:
        return f"logits are {off:.1e} apart, needs {FAR[dtype]:.0e}"
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    tokens = [m.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False) for m in (plain, quick)]
    return "" if torch.equal(*tokens) else "greedy tokens differ"


def works(quick: bool) -> Iterator[tuple[str, int, Callable[[Any], Callable[[int], object]]]]:
    """(name, tokens a call, maker of a call for a model)."""

    def prefill(length: int) -> Callable[[Any], Callable[[int], object]]:
        ids = prompts(1, length)
        return lambda model: lambda _: model(ids, logits_to_keep=1)

    def decode(batch: int, context: int) -> Callable[[Any], Callable[[int], object]]:
        ids = prompts(batch, context)

        def make(model: Any) -> Callable[[int], object]:
            cache = DynamicCache(config=model.config)
            model(ids, None, None, cache)  # by place: its keyword is not the same in all versions

            def call(_: int) -> None:
                token = ids[:, :1]
                for _ in range(steps):
                    token = model(token, None, None, cache).logits[:, -1].argmax(-1, keepdim=True)
                cache.crop(-steps)

            return call

        return make

    steps = STEPS // 4 if quick else STEPS
    for length in (512,) if quick else (512, 2048):
        yield f"prefill {length}", length, prefill(length)
    for batch, context in ((1, 512),) if quick else ((1, 512), (8, 512), (1, 2048)):
        yield f"decode, batch {batch}, context {context}", batch * steps, decode(batch, context)


def main() -> None:
    """Check, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, help="of both; all usable processors by default")
    parser.add_argument("--repeats", type=int, help="samples of each; the median counts (7; 3 with --quick)")
    parser.add_argument(
        "--experts", default="grouped_mm", help="transformers' own experts: grouped_mm, eager, batched_mm"
    )
    parser.add_argument("--quick", action="store_true", help="two rows, in less than a minute")
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--markdown", type=Path, help="save the table here")
    options = parser.parse_args()
    set_threads(options.threads)
    machine = facts()
    print(machine_line(machine), flush=True)
    repeats = options.repeats or (3 if options.quick else 7)
    rows: list[dict[str, Any]] = []
    wrong = False
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        make_checkpoint(Path(scratch), CONFIG)
        for dtype in FAR:
            plain, quick = make_pair(Path(scratch), dtype, options.experts)
            if why := check(plain, quick, dtype):
                print(f"{dtype}: not timed: {why}", flush=True)
                wrong = True
                continue
            for name, tokens, make in works(options.quick):
                took = interleaved({"transformers": make(plain), "accelerated": make(quick)}, 2, repeats)
                rows.append({"dtype": dtype, "work": name, "tokens": tokens, **took})
                print(f"{dtype}, {name}: {took['transformers'] / took['accelerated']:.2f}x", flush=True)
    table = [
        [r["dtype"], r["work"], *(f"{r['tokens'] / r[n]:.0f} tokens/s ({seconds(r[n])})" for n in HEAD[2:4]),
         f"{r['transformers'] / r['accelerated']:.2f}x"]
        for r in rows
    ]  # fmt: skip
    print("\n" + text_table(HEAD, table))
    if options.markdown:
        lines = [
            machine_line(machine),
            "",
            f"transformers' experts: {options.experts}",
            "",
            markdown_table(HEAD, table),
        ]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.json:
        save_json(options.json, {"machine": machine, "config": CONFIG.to_dict(), "rows": rows})
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
