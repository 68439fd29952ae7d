"""No object of a level holds an instruction of a higher one: what an older processor may be handed is safe for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

OBJECTS = Path(__file__).parents[2] / "build"
# Operands and mnemonics that no processor of the level knows, as objdump spells them.
YMM, ZMM = r"%ymm", r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])"
VEX = r"\tv[a-z]"
VNNI, BF16, TILES = r"\tvpdp[bw]\w+sd", r"\tv(dpbf16|cvtne\w*bf16|cvtneps2bf16)", r"%tmm|\t(ld|st)tilecfg"
ABOVE = {
    "baseline": (VEX, YMM, ZMM, TILES),
    "avx2": (ZMM, VNNI, BF16, TILES),
    "avx512": (VNNI, BF16, TILES),
    "avx512_vnni": (BF16, TILES),
    "avx512_bf16": (TILES,),
}


def newest_build() -> Path | None:
    """The build folder that was written last, with objects of the CPU's levels in it."""
    found = {p.parents[1] for p in OBJECTS.glob("*/csrc/CMakeFiles/glm5_cpu_baseline.dir")}
    found = {p for p in found if (p / "libglm5_kernels.a").exists()}
    return max(found, key=lambda p: (p / "libglm5_kernels.a").stat().st_mtime, default=None)


def offences(file: Path, pattern: re.Pattern[str]) -> list[str]:
    """The first instructions of an object that match."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(file)], check=True, capture_output=True, text=True
    ).stdout
    return [line.strip() for line in text.splitlines() if pattern.search(line)][:3]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("built", ABOVE)
def test_objects_stay_inside_their_level(built: str) -> None:
    build = newest_build()
    if build is None:
        pytest.skip("the object files are not kept here")
    files = sorted(build.glob(f"CMakeFiles/glm5_cpu_{built}.dir/**/*.o"))
    if built == "baseline":
        others = sorted(build.glob("CMakeFiles/glm5_kernels.dir/**/*.o"))
        files += [file for file in others if not file.name.startswith("probe.")]  # it asks the processor first
    assert files or built == "avx512_vnni", f"no object of {built} in {build}"
    pattern = re.compile("|".join(ABOVE[built]))
    for file in files:
        assert not (found := offences(file, pattern)), f"{file.name} of {built}: {found}"


def test_the_patterns_know_what_they_look_for() -> None:
    lines = {
        VEX: "  1a:\tvaddps %xmm0,%xmm1,%xmm2",
        YMM: "  1a:\tvaddps %ymm0,%ymm1,%ymm2",
        ZMM: "  1a:\tvaddps %xmm17,%xmm1,%xmm2",
        VNNI: "  1a:\tvpdpbusd %ymm0,%ymm1,%ymm2",
        BF16: "  1a:\tvdpbf16ps %zmm0,%zmm1,%zmm2",
        TILES: "  1a:\ttdpbf16ps %tmm0,%tmm1,%tmm2",
    }
    for pattern, line in lines.items():
        assert re.search(pattern, line), line
        assert not re.search(pattern, "  1a:\taddps %xmm0,%xmm1"), pattern
