"""What benchmarks decide without a clock: turns, targets, baselines, and what child processes say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_model import Program, agreement
from peers import protocol
from rig import attention, case, products, table, timing
from rig.baselines import Baselines, processor_class


def test_competitors_take_turns_and_start_at_different_inputs() -> None:
    calls: list[tuple[str, int]] = []
    runners = {name: lambda n, name=name: calls.append((name, n)) for name in ("ours", "torch")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SAMPLE_SECONDS", 0.0)  # one call a sample
        timing.interleaved(runners, sets=6, repeats=4)
    warm = timing.WARM_CALLS
    assert [name for name, _ in calls] == ["ours"] * warm + ["torch"] * warm + ["ours", "torch"] * 4
    assert [n for name, n in calls if name == "ours"] == [0, 1, 2, 3, 4, 5]
    assert [n for name, n in calls if name == "torch"] == [3, 4, 5, 0, 1, 2]


def test_the_summary_is_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    costs = iter([1.0, 1.0, 5.0, 2.0, 3.0])  # two that warm up, then three samples

    def call(_: int) -> None:
        now[0] += next(costs)

    assert timing.interleaved({"one": call}, 1, 3) == {"one": 3.0}
    costs = iter([1.0, 1.0, 5.0, 2.0, 3.0])
    assert timing.interleaved({"one": call}, 1, 3, min) == {"one": 2.0}


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.5e-5, "45 us"), (1.5e-7, "150 ns"), (1.0, "1 s")]
)
def test_durations_keep_three_digits(value: float, text: str) -> None:
    assert table.seconds(value) == text


def test_a_target_that_is_missed_gets_a_star() -> None:
    assert table.against(2.5, 2.0, "{:.1f}x") == "2.5x (2.0x)"
    assert table.against(1.5, 2.0, "{:.1f}x") == "1.5x (2.0x)*"
    assert table.against(0.5, None, "{:.0%}") == "50%"
    assert table.against(None, 2.0, "{:.1f}x") == "-"


def test_tables_line_up() -> None:
    assert table.text_table(("op", "time"), [("linear", "1 s"), ("x", "-")]).splitlines() == [
        "op      time", "------------", "linear  1 s", "x       -",
    ]  # fmt: skip
    assert table.markdown_table(("a", "b"), [("1", "2")]).splitlines() == ["| a | b |", "|---|---|", "| 1 | 2 |"]


def test_a_baseline_falls_only_past_its_margin() -> None:
    stored = Baselines("some processor", 2, 0.3, {"linear": 2.0, "gone": 1.0})
    assert stored.fell("linear", 1.39)
    assert not stored.fell("linear", 1.41)
    assert not stored.fell("new", 0.01)
    assert stored.changes({"linear": 2.1, "gone": 1.0}) == []
    assert stored.changes({"linear": 1.3, "new": 3.0}) == [
        "gone: 1.00x is stored, was not run",
        "linear: 2.00x -> 1.30x, -35% FELL",
        "new: 3.00x, nothing is stored",
    ]
    assert stored.changes({"linear": 1.6, "gone": 1.5}) == [
        "gone: 1.00x -> 1.50x, 50% faster",
        "linear: 2.00x -> 1.60x, -20% slower",
    ]


def test_baselines_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "amx.json"
    assert Baselines.load(path) == Baselines()
    Baselines("some processor", 2, 0.25, {"b": 1.234567, "a": 2.0}).save(path)
    assert Baselines.load(path) == Baselines("some processor", 2, 0.25, {"a": 2.0, "b": 1.23})
    assert list(json.loads(path.read_text())["ratios"]) == ["a", "b"]


def test_a_processor_has_a_class() -> None:
    known = {"reference", "baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"}
    assert processor_class() in known


def test_far_says_why() -> None:
    want = torch.tensor([3.0, 4.0])
    assert case.far(want, want, 1e-6) == ""
    assert case.far(want + torch.tensor([0.0, 0.5]), want, 0.11) == ""
    assert case.far(want + torch.tensor([0.0, 0.5]), want, 0.09) == "relative error is 1.00e-01, needs at most 9e-02"
    assert case.far(want[:1], want, 1.0) == "shape is (1,), needs (2,)"


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, products):
        monkeypatch.setattr(module, "cold_bytes", lambda: 1 << 20)


SMALL = {
    "sparse_flash_attention": lambda: attention.attention_decode(2, context=4096),
    "topk_indexer decode": lambda: attention.indexer_decode(4096),
    "topk_indexer prefill": lambda: attention.indexer_prefill(3, 4096),
    "linear": lambda: products.linear(3, inputs=64, outputs=48),
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", SMALL)
def test_both_sides_of_a_case_compute_the_same(name: str) -> None:
    """The check takes ours and refuses a spoiled result; torch's compositions agree with ours."""
    one = SMALL[name]()
    result = one.ours(0)
    assert one.check(result) == ""
    first = result[0] if isinstance(result, tuple) else result
    spoiled = first.clone()
    spoiled[0] = spoiled[0].flip(-1) if spoiled.dtype == torch.int32 else spoiled[0] + spoiled[0].abs().mean()
    assert one.check((spoiled, *result[1:]) if isinstance(result, tuple) else spoiled) != ""
    for form, function in one.eager.items():
        theirs = function(*one.torch_inputs[0])
        if first.dtype == torch.int32:
            for mine, row in zip(first[:, 0].tolist(), theirs.view(len(first), -1).tolist(), strict=True):
                assert len(set(mine) & set(row)) > 0.97 * len(mine), form  # bf16 scores tie where ours do not
        else:
            assert case.far(theirs, first.float(), 2e-2) == "", form


@pytest.mark.parametrize("kind", ["bf16", "w8a8"])
def test_experts_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.Experts, "hidden", 64)
    monkeypatch.setattr(products.Experts, "width", 32)
    one = products.Experts(8).case(5, kind)
    result = one.ours(0)
    assert one.check(result) == ""
    assert one.check(result * 1.1) != ""
    for form, function in one.eager.items():
        theirs = function(*one.torch_inputs[0])
        assert case.far(theirs, result.float(), 5e-2 if kind == "w8a8" else 2e-2) == "", form


def test_tokens_are_ordinary_and_differ_between_requests() -> None:
    one, other = (protocol.token_ids(600, 1000, request) for request in (0, 1))
    assert all(16 <= t < 1000 for t in one + other)
    assert one != other
    assert protocol.token_ids(10, 1000) == one[:10]
    assert len(set(one)) > 100


def test_a_childs_results_are_told_from_its_chatter(capsys: pytest.CaptureFixture[str]) -> None:
    class Runner:
        def __init__(self, options: Any) -> None:
            self.options = options

        def about(self) -> dict[str, Any]:
            return {"version": "1"}

        def run(self, w: protocol.Workload) -> float:
            if w.int8:
                raise protocol.Unsupported("no int8 here")
            return w.context * 2.0

    work = [protocol.Workload("prefill", 8), protocol.Workload("decode", 8, int8=True)]
    arguments = ["child", "--checkpoint", "x", "--threads", "2", "--workloads", protocol.as_arguments(work)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        protocol.serve(Runner)
    found = [protocol.parse_line(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["value"], f["why"]) for f in found[:2]] == [(16.0, ""), (None, "no int8 here")]
    assert found[2] == {"about": {"version": "1"}}
    assert protocol.parse_line("loading model") is None


@pytest.mark.parametrize(
    ("body", "results", "absent"),
    [
        ("raise SystemExit('absent: not installed')", [(None, "absent: not installed")], "not installed"),
        ("raise ValueError('broken')", [(None, "ValueError: broken")], ""),
        ("raise SystemExit(3)", [(None, "ended with 3")], ""),
        ("pass", [(None, "stopped")], ""),
    ],
)
def test_a_child_that_fails_leaves_a_reason(
    tmp_path: Path, body: str, results: list[Any], absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cpu_model

    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "child.py").write_text(body)
    monkeypatch.setattr(cpu_model, "HERE", tmp_path)
    program = Program("child", "child.py", sys.executable)
    assert program.run(tmp_path, 1, [protocol.Workload("prefill", 8)], 60) == results
    assert program.absent == absent


def test_a_program_without_an_interpreter_is_absent(tmp_path: Path) -> None:
    program = Program("child", "run_llama.py", str(tmp_path / "python"))
    program.run(tmp_path, 1, [protocol.Workload("prefill", 8)], 60)
    assert "No such file" in program.absent


def test_logits_agree_by_direction() -> None:
    assert agreement([1.0, 2.0], [2.0, 4.0]) == pytest.approx(1.0)
    assert agreement([1.0, 0.0], [0.0, 1.0]) == pytest.approx(0.0)
    assert agreement([1.0], [1.0, 2.0]) == 0.0
