"""The real kernels with a bug planted: built anew each time, so for the long tier. Each is caught, by its words."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
TESTS = ["tests/sim/test_sim_schedules.py", "tests/sim/test_sim_values.py"]
RUN = """
import sys
# An editable install has a finder of its own, which goes before the path.
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "_editable_skbc_glm5sdk_sim"]
sys.path[:0] = [{package!r}]
import glm5sdk_sim
assert glm5sdk_sim.__file__.startswith({package!r}), glm5sdk_sim.__file__
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-q", "--tb=short", *{tests!r}]))
"""


def _checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built copy of what the simulator is made of."""
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("cmake or ninja is not on this machine")
    copy = tmp_path_factory.mktemp("mutants")
    for name in ("csrc", "bindings", "backends/sim"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", copy)
    options = ["-G", "Ninja", "-DGLM5_TARGET=cuda_sim", f"-DPython_EXECUTABLE={sys.executable}"]
    _checked("cmake", "-S", str(copy), "-B", str(copy / "build"), *options)
    _checked("ninja", "-C", str(copy / "build"), "-j1")
    return copy


def _tests(tree: Path) -> subprocess.CompletedProcess[str]:
    code = RUN.format(package=str(tree / "backends/sim"), tests=TESTS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.full
def test_without_a_bug_all_passes(tree: Path) -> None:
    done = _tests(tree)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_bug_in_a_kernel_is_caught(tree: Path, mutant: Mutant) -> None:
    path = tree / "csrc/cuda" / mutant.file
    text = path.read_text()
    assert mutant.old in text, f"{mutant.file} no longer holds {mutant.old!r}"
    path.write_text(text.replace(mutant.old, mutant.new, 1))
    try:
        _checked("ninja", "-C", str(tree / "build"), "-j1")
        done = _tests(tree)
    finally:
        path.write_text(text)
    faults = re.findall(r"KernelFault: (.*)", done.stdout)
    assert done.returncode == 1, done.stdout[-4000:]
    assert faults, f"caught, but by no check of the simulator: {done.stdout[-3000:]}"
    assert any(re.search(mutant.says, fault) for fault in faults), faults[:3]


def test_every_bug_finds_its_place() -> None:
    missing = [m.name for m in MUTANTS if m.old not in (ROOT / "csrc/cuda" / m.file).read_text()]
    assert missing == []
