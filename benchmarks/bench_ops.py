"""Every (op, implementation) at GLM-5's geometry, under the roofline; refused while the pair's quick check is red."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import pytest
import torch

from glm5sdk.perf import achieved, measure_peaks, time_call
from glm5sdk.registry import CATALOGUE, Op, use
from glm5sdk.registry.device import named_dtype
from glm5sdk.testing import TIERS, CheckFailed, Example, arguments, check_pair
from glm5sdk.testing.inputs import dtypes_of
from glm5sdk.testing.pair import find_impl
from glm5sdk.testing.pairs import ops_to_run

# GLM-5's sizes where one machine's memory allows; experts and vocabulary are cut, one expert is as large as GLM-5's.
GLM5 = {
    "N": 6144, "H": 64, "C": 512, "R": 64, "Q": 2048, "Dn": 192, "Dv": 256, "Hi": 32, "Di": 128, "G": 1, "K": 2048,
    "E": 16, "A": 8, "I": 2048, "V": 32768, "S": 64, "M": 64, "P": 80, "B": 1, "O": 2048, "Pmax": 8192, "Cap": 512,
}  # fmt: skip
OTHER = {
    "grouped_gemm": {"M": 128, "I": 2048},
    "moe_gate": {"E": 256},
    "sample": {"V": 154880},
    "dequantize": {"G": 1},
    "hadamard": {"N": 8192},
}
ROWS = {"decode": 1, "batch": 16, "prefill": 128}
SEEDS = range(20)
SECONDS = 0.3


def pairs() -> list[tuple[str, str]]:
    """Forward ops and their native implementations, best first; the reference where there is none."""
    found = []
    for name in ops_to_run():
        if name.endswith("_bwd") or CATALOGUE[name].cost is None:
            continue
        impls = CATALOGUE[name].implementations()
        native = [impl.name for impl in impls if impl.kind == "native"]
        found += [(name, impl) for impl in native or [impls[0].name]]
    return found


@lru_cache(maxsize=1)
def inputs(name: str, preset: str, dtype: str) -> dict[str, Any]:
    """Arguments with every row live, every request full, caches in the plain format."""
    op = CATALOGUE[name]
    axes = tuple((a, size_of(op, a, preset)) for a in op.contract.axes)
    values = next(
        v
        for seed in SEEDS
        if (v := arguments(op, Example(0, axes, dtype, seed=seed))).get("format", "plain") == "plain"
    )
    sizes = dict(axes)
    if "request_ids" in values:
        values["request_ids"] = torch.arange(sizes["T"], dtype=torch.int32) % sizes["B"]
        capacity = sizes["M"] * sizes["S"]
        if "kv_lens" in values:
            values["kv_lens"] = torch.full((sizes["T"],), capacity, dtype=torch.int32)
        if "indices" in values:
            spread = torch.linspace(0, capacity - 1, min(sizes["K"], capacity)).int()
            values["indices"] = spread.expand(sizes["T"], sizes.get("G", 1), -1).contiguous()
    return values


def size_of(op: Op[..., Any], axis: str, preset: str) -> int:
    """An axis of GLM-5, or the preset's rows."""
    own = OTHER.get(op.name, {})
    if axis in own:
        return own[axis]
    return ROWS[preset] if axis == (op.rows or "T") else GLM5[axis]


@cache
def verdict(name: str, impl: str) -> str:
    """Why a pair may not be timed; empty when its quick check is green."""
    try:
        check_pair(CATALOGUE[name], impl, TIERS["smoke"])
    except CheckFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("preset", ROWS)
@pytest.mark.parametrize(("name", "impl"), pairs(), ids=lambda v: str(v))
def test_op(name: str, impl: str, preset: str, dtype: str, benchmark: Any, rows: list[str]) -> None:
    op = CATALOGUE[name]
    if dtype not in dtypes_of(op, find_impl(op, impl)):
        pytest.skip(f"{name} has no {dtype}")
    if red := verdict(name, impl):
        pytest.fail(f"not timed while it is wrong: {red}")
    values = inputs(name, preset, dtype)
    with use(impl), torch.no_grad():
        if op.explain(*values.values()).chosen != impl:
            pytest.skip(f"{impl} does not take {dtype}")
        benchmark.pedantic(op, tuple(values.values()), rounds=3, warmup_rounds=1)
        timing = time_call(lambda: op(*values.values()), SECONDS)
    assert op.cost is not None
    axes = {a: size_of(op, a, preset) for a in op.contract.axes}
    speed = achieved(op.cost(axes, named_dtype(dtype).itemsize), timing.median, measure_peaks(), dtype)
    benchmark.extra_info.update(
        flops=speed.flops, bytes_per_second=speed.bandwidth, bound=speed.bound, roofline=speed.share
    )
    rows.append(f"{name:<26} {impl:<14} {preset:<8} {dtype:<5} {speed}")
