"""Has a change made something slower? Ratios to torch in the same run, against those stored for this processor's class.

Red when a ratio falls by more than the stored margin; `--update-baselines` stores what this run found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rig import attention, products
from rig.baselines import Baselines
from rig.case import Case
from rig.machine import set_threads
from rig.timing import interleaved

THREADS, REPEATS = 2, 9
CASES: dict[str, Callable[[], Case]] = {
    "sparse_flash_attention B=1": lambda: attention.attention_decode(1, context=8192),
    "sparse_flash_attention B=4": lambda: attention.attention_decode(4, context=8192),
    "topk_indexer decode 32k": lambda: attention.indexer_decode(32768),
    "topk_indexer prefill 64 x 8k": lambda: attention.indexer_prefill(64, 8192),
    "moe_experts T=1": lambda: products.Experts(16).case(1, "bf16"),
    "moe_experts T=32": lambda: products.Experts(16).case(32, "bf16"),
    "mla_preprocess T=1": lambda: products.mla_preprocess(1),
    "linear 1 x 4096 x 4096": lambda: products.linear(1, inputs=4096, outputs=4096),
    "linear 16 x 4096 x 4096": lambda: products.linear(16, inputs=4096, outputs=4096),
    "linear 256 x 2048 x 2048": lambda: products.linear(256, inputs=2048, outputs=2048),
}


@pytest.mark.parametrize("name", CASES)
def test_ratio(name: str, benchmark: Any, stored: Baselines, ratios: dict[str, float]) -> None:
    set_threads(THREADS)
    with torch.inference_mode():
        case = CASES[name]()
        assert case.check(case.ours(0)) == ""
        runners = {form: lambda n, f=f: f(*case.torch_inputs[n]) for form, f in case.eager.items()}
        times = interleaved({"ours": case.ours, **runners}, len(case.inputs), REPEATS, min)
        benchmark.pedantic(case.ours, (0,), rounds=3)
    torch_name = min(runners, key=lambda form: times[form])
    ratio = ratios[name] = times[torch_name] / times["ours"]
    benchmark.extra_info.update(ratio=ratio, torch=torch_name, implementation=case.implementation()[0])
    assert not stored.fell(name, ratio), (
        f"{name} is {ratio:.2f}x torch's {torch_name}, needs {stored.ratios[name] * (1 - stored.margin):.2f}x: "
        f"{stored.ratios[name]:.2f}x is stored with a margin of {stored.margin:.0%}"
    )
