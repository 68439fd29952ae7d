"""glm5 bench: what it writes and prints and refuses; how fast it is, is nobody's business here."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import glm5sdk
from glm5sdk.cli.app import app
from glm5sdk.cli.bench import Measure, bench_model, compare_reports, run
from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.perf.report import Report, Results, Workload, read_report

QUICK = Measure(batch=2, prompt_tokens=5, new_tokens=3, repeats=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    Glm5ForCausalLM(preset("tiny", num_hidden_layers=2, num_nextn_predict_layers=0)).save_pretrained(folder)
    return folder


def printed(call: Any, *arguments: Any) -> str:
    text = io.StringIO()
    call(Console(file=text, width=160), *arguments)
    return text.getvalue()


def test_a_report_says_what_was_run_where(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    text = printed(bench_model, checkpoint, Measure(2, 5, 3, 1, hardware="this box"), ["reference"], path)
    report = read_report(path)
    assert (report.hardware, report.workload.model, report.workload.dtype) == ("this box", "small", "float32")
    assert (report.workload.batch, report.workload.prompt_tokens, report.workload.new_tokens) == (2, 5, 3)
    assert report.machine["device"] == "cpu"
    assert report.machine["torch"] == torch.__version__
    assert set(report.machine["backends"]) == {n for n, b in glm5sdk.backends().items() if not b.reason}
    r = report.results
    assert r.prefill_tokens_per_second == pytest.approx(2 * 5 / r.first_token_seconds)
    assert r.decode_tokens_per_second == pytest.approx(2 / r.token_seconds)
    assert r.token_seconds <= r.token_seconds_p95
    for row in ("prefill, tokens/s", "decode, tokens/s", "first token, ms", "between tokens, ms", "this box"):
        assert row in text
    assert "small, float32, batch 2, 5 prompt and 3 new tokens" in text


def test_another_config_has_another_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "small"
    Glm5ForCausalLM(preset("tiny", num_hidden_layers=1, num_nextn_predict_layers=0)).save_pretrained(other)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for folder, path in zip((checkpoint, other), paths, strict=True):
        printed(bench_model, folder, QUICK, ["reference"], path)
    with pytest.raises(ContractError, match="compare: the work of .* is not that of .*: fingerprint is"):
        compare_reports(Console(file=io.StringIO()), paths, None)


def test_every_request_gets_every_token(checkpoint: Path) -> None:
    """The steps that are timed are the model's: a counting model sees each of them once."""
    model = Glm5ForCausalLM.from_pretrained(checkpoint)
    seen: list[int] = []
    forward = model.hidden_states

    def counting(ids: torch.Tensor, context: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(ids, context)

    model.hidden_states = counting  # type: ignore[method-assign]
    with torch.no_grad(), glm5sdk.use("reference"):
        results = run(model, Measure(batch=2, prompt_tokens=5, new_tokens=3, repeats=2))
    assert seen == [10, 2, 2] + [10, 2, 2, 2] * 2  # a short one that warms up, then two that count
    assert all(math.isfinite(v) and v > 0 for v in vars(results).values())


@pytest.mark.parametrize("name", ["batch", "prompt_tokens", "new_tokens", "repeats", "threads"])
def test_counts_below_one_are_refused(checkpoint: Path, name: str) -> None:
    with pytest.raises(ContractError, match=f"bench: {name} is 0, needs at least 1"):
        bench_model(Console(), checkpoint, Measure(**{name: 0}), [], None)


def test_what_cannot_be_measured_is_refused_before_it_starts(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="bench: prompt and new tokens are 1025, needs at most 1024"):
        bench_model(Console(), checkpoint, Measure(prompt_tokens=1000, new_tokens=25), [], None)
    with pytest.raises(CheckpointError, match="nowhere"):
        bench_model(Console(), tmp_path / "nowhere", QUICK, [], None)
    with pytest.raises(ContractError, match="bench: folder of .*out.json is missing"):
        bench_model(Console(), checkpoint, QUICK, [], tmp_path / "nowhere" / "out.json")


def reports(folder: Path) -> list[Path]:
    workload = Workload("small", "abc", "bfloat16", 1, 512, 64)
    found = []
    for name, scale in (("old box", 1.0), ("new [box]", 2.0)):
        path = folder / f"{len(found)}.json"
        Report(name, workload, Results(1000 * scale, 100 * scale, 0.5 / scale, 0.01 / scale, 0.02 / scale), {}).save(
            path
        )
        found.append(path)
    return found


def test_comparison_prints_speed_latency_and_cost(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\n"old box" = 0.36\n"new [box]" = 1.44\n')
    lines = printed(compare_reports, reports(tmp_path), prices).splitlines()
    found = {line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]] for line in lines if "│" in line}
    assert found["decode, tokens/s"] == ["100.0", "200.0"]
    assert found["first token, ms"] == ["500.0", "250.0"]
    assert found["between tokens, ms"] == ["10.00", "5.00"]
    assert found["decode against the first"] == ["1.00x", "2.00x"]
    assert found["EUR an hour"] == ["0.36", "1.44"]
    assert found["EUR per million prompt tokens"] == ["0.1", "0.2"]
    assert found["EUR per million new tokens"] == ["1", "2"]
    assert "new [box]" in "".join(lines)


def test_the_command_line(tmp_path: Path, checkpoint: Path) -> None:
    runner = CliRunner()
    paths = [str(p) for p in reports(tmp_path)]
    done = runner.invoke(app, ["bench", "--compare", *paths])
    assert done.exit_code == 0
    for arguments, message in (
        (["bench", *paths], "bench: models is 2, needs 1"),
        (["bench", str(checkpoint), "--prices", "p.toml"], "bench: --prices was given without --compare"),
        (["bench", "--compare", paths[0]], "compare: reports is 1, needs at least 2"),
        (["bench", "--compare", *paths, "--prices", "nowhere.toml"], "prices: nowhere.toml is not readable"),
    ):
        done = runner.invoke(app, arguments)
        assert isinstance(done.exception, ContractError)
        assert message in str(done.exception)
    out = tmp_path / "out.json"
    done = runner.invoke(app, ["bench", str(checkpoint), "--json", str(out), "--prompt", "4", "--new", "2",
                               "--repeats", "1", "--backend", "reference", "--hardware", "here"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["hardware"] == "here"
