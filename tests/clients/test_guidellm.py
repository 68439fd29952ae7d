"""guidellm measures the server without an error, and both count the same tokens."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from client_environment import outside

pytestmark = pytest.mark.full


def counted(server: str) -> dict[str, float]:
    """The server's counters."""
    text = httpx.get(f"{server}/metrics", headers={"authorization": "Bearer secret"}, timeout=60).text
    return {name: float(value) for name, value in re.findall(r"^(glm5_\w+) ([-\d.e+]+)$", text, re.MULTILINE)}


@pytest.mark.parametrize(
    "profile, requests, runs",
    [
        ("kind=concurrent,streams=4", 12, 1),
        ("kind=sweep,sweep_size=3", 4, 3),  # one by one, all at once, and one rate between
    ],
)
def test_benchmark(
    profile: str, requests: int, runs: int, server: str, checkpoint: Path, client_python: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    before = counted(server)
    command = [
        client_python, "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={server},model=checkpoint,api_key=secret",
        "--tokenizer", f"kind=hf_auto,model={checkpoint}",
        "--profile", profile,
        "--constraint", f"kind=max_requests,count={requests}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
        "--output", f"kind=json,path={report}",
        "--disable-console-interactive",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path, env=outside()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())["benchmarks"]
    assert len(found) == runs
    totals = [run["metrics"]["request_totals"] for run in found]
    assert all(total["successful"] == requests and total["errored"] == total["incomplete"] == 0 for total in totals)
    after = counted(server)
    gained = {name: after[name] - before[name] for name in before if name in after}
    for ours, theirs in (
        ("glm5_generation_tokens_total", "output_token_count"),
        ("glm5_prompt_tokens_total", "prompt_token_count"),
    ):
        assert gained[ours] == sum(run["metrics"][theirs]["successful"]["total_sum"] for run in found)
    assert gained["glm5_requests_finished_total"] == requests * runs
    assert gained["glm5_requests_aborted_total"] == 0 == gained["glm5_requests_rejected_total"]
    assert gained["glm5_generation_tokens_total"] == 12 * requests * runs, "it asks for ignore_eos"
