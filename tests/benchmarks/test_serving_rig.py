"""What the serving benchmark decides without a clock: traffic, comparisons, and children that fail in every way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from peers.traffic import Request, agreeing_share, as_input, mixed, same_tokens
from rig.open_loop import percentile, poisson
from rig.race import WRONG, Child, Program, race

CHILD = """
import json, sys
requests = json.loads(sys.stdin.readline())
shift = {shift}
print("loading")
print({mark!r} + json.dumps({{"tokens": [[p + shift for p in r["prompt"][: r["new_tokens"]]] for r in requests], "about": {{}}}}), flush=True)
for line in sys.stdin:
    print({mark!r} + json.dumps({{"seconds": {seconds}}}), flush=True)
"""  # noqa: E501 - a program's text
REQUESTS = [Request([7, 8, 9], 2), Request([5, 6], 2)]


def _program(folder: Path, name: str, text: str) -> Program:
    script = folder / f"{name}.py"
    script.write_text(text)
    return Program(name, str(script), sys.executable)


def _echo(folder: Path, name: str, shift: int = 0, seconds: float = 2.0) -> Program:
    from peers.protocol import MARK

    return _program(folder, name, CHILD.format(shift=shift, mark=MARK, seconds=seconds))


def test_traffic_is_the_same_every_time_and_mixed() -> None:
    requests = mixed(32, 1000)
    assert requests == mixed(32, 1000)
    assert len({tuple(r.prompt) for r in requests}) == 32
    assert len({len(r.prompt) for r in requests[:16]}) == len({r.new_tokens for r in requests[:16]}) == 16
    assert all(16 <= token < 1000 for r in requests for token in r.prompt)
    assert len(mixed(1, 1000, 0.001)[0].prompt) == 2
    assert as_input(requests).count("\n") == 1


def test_agreement_ends_at_the_first_difference() -> None:
    mine = [[1, 2, 3, 4], [5, 6]]
    assert agreeing_share(mine, mine) == 1.0
    assert agreeing_share(mine, [[1, 9, 3, 4], [5, 6]]) == 3 / 6
    assert agreeing_share(mine, [[1, 2], [7, 6]]) == 2 / 6
    assert same_tokens(mine, [[1, 2, 3, 4], [5, 7]]) == 1


def test_percentiles_and_arrivals() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
    assert percentile([], 0.5) == 0.0
    times = poisson(4000, 8.0)
    assert times == sorted(times) == poisson(4000, 8.0)
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.1)


def test_a_race_of_right_programs(tmp_path: Path) -> None:
    ours, theirs = _echo(tmp_path, "ours", seconds=2.0), _echo(tmp_path, "theirs", seconds=8.0)
    race([ours, theirs], tmp_path, 1, "float32", REQUESTS, 3, 60)
    assert (ours.rate, theirs.rate) == ({"float32": 2.0}, {"float32": 0.5})  # four useful tokens
    assert (ours.same, theirs.same) == ({"float32": "2 of 2"}, {"float32": "2 of 2"})


def test_wrong_tokens_are_not_timed_in_any_dtype(tmp_path: Path) -> None:
    ours, wrong = _echo(tmp_path, "ours"), _echo(tmp_path, "wrong", shift=1)
    for dtype in ("float32", "bfloat16"):
        race([ours, wrong], tmp_path, 1, dtype, REQUESTS, 1, 60)
    assert set(ours.rate) == {"float32", "bfloat16"}
    assert wrong.rate == {}
    assert wrong.why["float32"].startswith(f"{WRONG}: 0 of 2 requests, 0% of tokens")
    assert wrong.why["bfloat16"].startswith("not timed: ")


def test_a_program_without_float32_must_begin_alike(tmp_path: Path) -> None:
    ours, other = _echo(tmp_path, "ours"), _echo(tmp_path, "other", shift=1)
    race([ours, other], tmp_path, 1, "bfloat16", REQUESTS, 1, 60)
    assert "bfloat16" not in other.rate
    assert WRONG in other.why["bfloat16"]


def test_children_that_fail_say_why(tmp_path: Path) -> None:
    ours = _echo(tmp_path, "ours")
    absent = _program(tmp_path, "absent", "import sys; sys.exit('absent: it is not installed')")
    broken = _program(tmp_path, "broken", "raise ValueError('no such thing')")
    nowhere = Program("nowhere", "x.py", str(tmp_path / "python-that-is-not-there"))
    race([ours, absent, broken, nowhere], tmp_path, 1, "float32", REQUESTS, 1, 60)
    assert absent.why["float32"] == "it is not installed"
    assert broken.why["float32"] == "ValueError: no such thing"
    assert nowhere.why["float32"] == "absent: No such file or directory"
    assert set(ours.rate) == {"float32"}


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    child = Child(_program(tmp_path, "hangs", "import time; time.sleep(600)"), tmp_path, 1, "float32", limit=1)
    assert child.ask(as_input(REQUESTS)) == {"why": "took more than 1 s"}
    child.close()
    assert child.process.poll() is not None
