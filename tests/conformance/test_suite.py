"""The suite's own parts: what it draws, what it requires to have run, how it compares, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.registry import CATALOGUE, Weight
from glm5sdk.testing import TIERS, CheckFailed, Example, arguments
from glm5sdk.testing.inputs import geometries, random_examples, widen
from glm5sdk.testing.memory import ABSENT, HUGE, Guarded
from glm5sdk.testing.oracle import consult
from glm5sdk.testing.pair import find_impl
from glm5sdk.testing.pairs import FOLDER, ops_to_run, pairs_to_run, required_pairs
from glm5sdk.testing.rows import take
from glm5sdk.testing.tiers import chosen_variants
from glm5sdk.testing.tolerance import Tolerance, compare_results, same_bits

LEVELS = ("baseline", "avx2", "avx512", "avx512_vnni")


def test_the_short_tiers_run_the_lowest_and_the_best_variant() -> None:
    variants = ["avx512", "sm90", "baseline", "avx2"]
    assert chosen_variants(variants, LEVELS, TIERS["test"]) == ["baseline", "avx512", "sm90"]
    assert chosen_variants(variants, LEVELS, TIERS["full"]) == ["baseline", "avx2", "avx512", "sm90"]
    assert chosen_variants(["avx2"], LEVELS, TIERS["smoke"]) == ["avx2"]


@pytest.mark.parametrize("name", ["rms_norm", "linear", "sparse_flash_attention", "moe_gate", "linear_bwd"])
def test_an_example_can_be_drawn_again(name: str) -> None:
    op = CATALOGUE[name]
    example = geometries(op, find_impl(op, "reference"))[1]
    first, again = arguments(op, example), arguments(op, example)
    assert list(first) == list(op.signature.parameters)
    for a, b in zip(first.values(), again.values(), strict=True):
        if isinstance(a, Weight):
            assert (a.tag, a.shape) == (b.tag, b.shape) and all(map(same_bits, a.tensors, b.tensors))
        else:
            assert a == b if not isinstance(a, torch.Tensor) else same_bits(a, b)
    op.contract.bind(*first.values())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(set(ops_to_run()))))
def test_random_examples_keep_the_contract(data: Any, name: str) -> None:
    op = CATALOGUE[name]
    example = data.draw(random_examples(op, find_impl(op, "reference")))
    op.contract.bind(*arguments(op, example).values())


def test_every_option_meets_every_dtype() -> None:
    op = ops.linear
    met = {(e.index % len(op.tests.options), e.dtype) for e in geometries(op, find_impl(op, "reference"))}
    assert met == {(option, dtype) for option in range(len(op.tests.options)) for dtype in ("f32", "bf16")}


def test_float64_is_the_same_numbers() -> None:
    example = Example(2, (("T", 2), ("N", 3), ("O", 4)), "bf16")
    drawn = arguments(ops.linear, example)
    wide = widen(drawn)
    assert wide["x"].dtype == torch.float64
    assert torch.equal(wide["x"], drawn["x"].double())
    assert wide["out_dtype"] == torch.float64


def test_an_argument_without_value_is_named() -> None:
    def compute(x: torch.Tensor, eps: float) -> torch.Tensor:
        return x * eps

    from glm5sdk.registry import op

    compute.__name__ = "conformance_without_value"
    declared = op(inputs={"x": "a[T]"}, outputs={"y": "a[T]"}, rows="T")(compute)
    with pytest.raises(ContractError, match="eps has no default, needs a value from TestRules"):
        arguments(declared, Example(0, (("T", 1),), "f32"))


@pytest.mark.parametrize("fill", [ABSENT, HUGE])
def test_sentinels_lie_on_both_sides(fill: int) -> None:
    for shape in ((3, 5), (0,), ()):
        guarded = Guarded(shape, torch.bfloat16, torch.device("cpu"), fill)
        assert guarded.damage() == ""
        guarded.tensor.fill_(1)
        assert guarded.damage() == ""
    t = guarded.tensor
    t.as_strided((1,), (1,), t.storage_offset() + 3).fill_(1)
    assert guarded.damage() == "6 bytes behind its end"
    t.as_strided((1,), (1,), t.storage_offset() - 2).fill_(1)
    assert guarded.damage() == "4 bytes before its start"
    assert Guarded((1,), torch.float32, torch.device("cpu"), ABSENT).tensor.isnan().all()


def test_rows_are_taken_from_every_argument_that_has_them() -> None:
    drawn = arguments(
        ops.sparse_flash_attention, geometries(ops.sparse_flash_attention, find_impl(ops.rms_norm, "reference"))[1]
    )
    some = take(ops.sparse_flash_attention, drawn, torch.tensor([2, 0, 2]))
    for name in ("q", "request_ids", "indices"):
        assert torch.equal(some[name], drawn[name][[2, 0, 2]])
    assert torch.equal(some["kv_cache"], drawn["kv_cache"])
    assert torch.equal(some["block_table"], drawn["block_table"])


def test_errors_are_measured_against_the_references_own() -> None:
    oracle = consult(ops.rms_norm, Example(0, (("T", 3), ("N", 64)), "bf16"))
    compare_results(ops.rms_norm, oracle, oracle.same, exact=False)
    wrong = {"y": oracle.same["y"].clone()}
    wrong["y"][1, 7] += 0.25
    with pytest.raises(CheckFailed, match=r"check 'right': y\[1, 7\] is .*the error is 0\.2.*needs <= .* = 4 x"):
        compare_results(ops.rms_norm, oracle, wrong, exact=False)
    wrong["y"][1, 7] = torch.nan
    with pytest.raises(CheckFailed, match=r"y\[1, 7\] is nan"):
        compare_results(ops.rms_norm, oracle, wrong, exact=False)
    with pytest.raises(CheckFailed, match=r"y is torch.float32 \(3, 64\), needs torch.bfloat16"):
        compare_results(ops.rms_norm, oracle, {"y": oracle.same["y"].float()}, exact=False)


def test_a_tolerance_is_a_number_that_knows_its_outputs() -> None:
    tolerance = Tolerance({"out": 0.5, "lse": 0.25})
    assert (float(tolerance), tolerance.of["lse"]) == (0.5, 0.25)
    assert 0 < Tolerance({}) < 1e-5


def test_bits_are_compared_as_bits() -> None:
    assert same_bits(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, 0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.zeros(3, 2)[:, ::2], torch.zeros(3, 1))


def test_required_pairs_follow_tier_and_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text(
        "# head\nadd reference\nadd_bwd reference\nadd cpu.baseline\nadd cpu.avx2\nadd cpu.avx512\nadd cpu.odd\n"
    )

    def required(tier: str) -> set[str]:
        return required_pairs("cpu", tier, str(file))

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    if "cpu" in {p.partition(".")[0] for _, p in pairs_to_run("cpu", TIERS["full"])}:
        always = {"add reference", "add_bwd reference", "add cpu.odd", "add cpu.baseline"}
        assert required("test") == {*always, "add cpu.avx512"}
        assert required("full") == {*always, "add cpu.avx2", "add cpu.avx512"}
        assert required("smoke") == required("test") - {"add_bwd reference"}
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert required("full") == {*always, "add cpu.avx2"}
    assert required_pairs("nosuch", "test") == set()


def test_the_shipped_lists_name_only_what_there_is() -> None:
    lines = [line for line in (FOLDER / "reference.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    assert {line.split()[0] for line in lines} == set(ops_to_run())


def _suite(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5sdk.testing", "-p", "no:cacheprovider", "--tier", "smoke", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "_GLM5SDK", "COV"))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_suite_that_skipped_a_required_pair_is_red(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("add reference\nadd nosuch.kernel\n")
    result = _suite("--op", "add", "--backend", "reference", "--pairs", "pairs.txt", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    tail = result.stdout[result.stdout.index("required pairs that did not run") :]
    assert "add nosuch.kernel" in tail
    assert "add reference" not in tail
    assert "slowest example of a pair" in result.stdout


def test_an_unknown_backend_is_a_usage_error(tmp_path: Path) -> None:
    result = _suite("--backend", "nosuch", cwd=tmp_path)
    assert result.returncode == 4
    assert "backend is 'nosuch', needs one of" in result.stderr
