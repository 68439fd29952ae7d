"""Files stay within their size budgets."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _script() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "check_sizes.py"))


def test_no_file_is_over_its_budget() -> None:
    assert _script()["oversized"]() == []


def test_the_check_sees_every_kind_of_source() -> None:
    script = _script()
    assert script["HARD"] == {".py": 500, ".cpp": 700, ".h": 700, ".cu": 700, ".cuh": 700}
    assert Path(__file__).resolve() in script["source_files"]()


def test_a_long_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 501)
    (tmp_path / "fine.py").write_text("x = 1\n" * 500)
    script = _script()
    script["oversized"].__globals__["source_files"] = lambda root: sorted(root.iterdir())
    assert script["oversized"](tmp_path) == ["long.py: lines is 501, needs at most 500; split it by idea"]
