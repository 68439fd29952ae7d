"""The CUDA sources keep to their dialect, and every compiler at hand accepts them."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [p for p in sorted((ROOT / "csrc/cuda").rglob("*")) if p.suffix in (".cu", ".cuh", ".h")]
DEVICE = ROOT / "csrc/cuda/dev"
FOREIGN = r"\basm\b|__shared__|__sync|__shfl|__ballot|\bthreadIdx\b|\bblockIdx\b|\batomicAdd\b|\bINFINITY\b"


def _code(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def test_ptx_and_intrinsics_stand_in_dev_only() -> None:
    assert any("asm volatile" in p.read_text() for p in DEVICE.glob("*.h")), "dev/ holds no PTX: the pattern is wrong"
    hits = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in SOURCES
        if DEVICE not in path.parents and (found := re.search(FOREIGN, _code(path)))
    ]
    assert hits == []


def test_kernels_include_no_standard_header_for_the_run_time_compiler() -> None:
    """NVRTC has none: an #include <...> stands behind a check for it."""
    for path in SOURCES:
        before, _, _ = path.read_text().partition("#if !defined(__CUDACC_RTC__)")
        if path == DEVICE / "platform.h" or path.name == "host.h":
            continue  # its own conditions; included by launchers alone
        assert not re.search(r"#include <(?!cuda\.h)", before), path


def _report() -> dict:
    return runpy.run_path(str(ROOT / "scripts/ptxas_report.py"))


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_80'
ptxas info    : Function properties for _Z1av
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 384 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bv' for 'sm_80'
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers
"""


def test_spills_are_read_off_the_compilers_report() -> None:
    assert _report()["kernels"](REPORT) == [("_Z1av", 40, (0, 0, 0)), ("_Z1bv", 64, (8, 4, 12))]
    with pytest.raises(ValueError, match="needs name, stack and registers"):
        _report()["kernels"]("Compiling entry function '_Z1av'\n")


def _compile(*archs: str) -> str:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    done = subprocess.run(
        ["bash", "scripts/cuda_compile.sh", *archs], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nvcc_compiles_without_spills() -> None:
    """One architecture, the one whose register allocator is the tightest; ten seconds."""
    out = _compile("90a")
    assert "attention_bf16_kernel<PlainCache<bf16> >" in out
    assert len(out.splitlines()) >= 18


@pytest.mark.full
def test_nvcc_compiles_for_every_architecture() -> None:
    out = _compile()
    assert {line.split()[0] for line in out.splitlines()} == {"sm_80", "sm_90a", "sm_100", "sm_120"}


@pytest.mark.full
def test_the_run_time_compiler_accepts_the_same_files() -> None:
    script = runpy.run_path(str(ROOT / "scripts/nvrtc_compile.py"))
    assert set(script["FORMS"]) == {p.name for p in (ROOT / "csrc/cuda").glob("*.cu")}
    if find_spec("nvidia") is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    nvrtc = script["library"]()
    for name, forms in script["FORMS"].items():
        assert script["compile_source"](nvrtc, ROOT / "csrc/cuda" / name, forms, "90a") > 0
