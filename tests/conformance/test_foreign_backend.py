"""A backend from elsewhere, found by its entry point: a small honest one passes, and each broken one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = """
import os
from glm5sdk.registry.device import Device
from glm5sdk.registry.impl import Impl, Requires

MODE = os.environ["TOY"]


def kernel(x, w, eps, y):
    if MODE == "raises":
        raise ZeroDivisionError("in the kernel")
    v = x * (x * x).mean(-1, keepdim=True).add(eps).rsqrt() * w
    v = v * 1.01 if MODE == "wrong" else v + 1e-3 * (x.shape[0] > 1) if MODE == "knows its batch" else v
    if MODE == "writes its input":
        x.mul_(2)
    if MODE != "writes nothing":
        y.copy_(v)


class Toy:
    name, api_version, levels, automatic = "toy", 1, (), False

    def probe(self):
        if MODE == "probe raises":
            raise RuntimeError("no such card")
        return None if MODE == "probe gives nothing" else Device("cpu", "toy")

    def impls(self):
        if MODE == "import fails":
            import nothing_of_that_name
        name = "other.x" if MODE == "other name" else "toy.x"
        kind = "nativ" if MODE == "other kind" else "native"
        row = Impl("rms_norm", name, kind, kernel, Requires(("cpu",), ("f32",)), invariant=True)
        return {"no list": None, "no row": [None], "twice": [row, row]}.get(MODE, [row])


BACKEND = Toy()
if MODE == "old api":
    Toy.api_version = 0
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` leaves behind: a package and its metadata."""
    root = tmp_path_factory.mktemp("site")
    (root / "glm5sdk_toy.py").write_text(PACKAGE)
    info = root / "glm5sdk_toy-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: glm5sdk-toy\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[glm5sdk.backends]\ntoy = glm5sdk_toy:BACKEND\n")
    return root


def run(package: Path, mode: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TOY": mode, "PYTHONPATH": str(package)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


SUITE = ("-m", "pytest", "-q", "--pyargs", "glm5sdk.testing.test_pairs", "--backend", "toy", "--tier", "smoke",
         "-p", "no:cacheprovider", "-k", "rms_norm and (toy or composed)")  # fmt: skip


def test_a_backend_that_takes_one_dtype_of_one_op_passes(package: Path) -> None:
    done = run(package, "right", *SUITE)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.parametrize("mode", ["wrong", "raises", "writes its input", "writes nothing", "knows its batch"])
def test_the_suite_catches_a_kernel_that_is(package: Path, mode: str) -> None:
    done = run(package, mode, *SUITE)
    assert done.returncode == 1, done.stdout
    assert "test_pair[rms_norm-toy.x]" in done.stdout


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("probe raises", "no such card"), ("probe gives nothing", "needs a Device"),
        ("import fails", "nothing_of_that_name"),
        ("other name", "needs toy."), ("other kind", "kind of toy.x is 'nativ'"), ("no list", "TypeError"),
        ("no row", "needs an Impl"), ("twice", "stands twice"), ("old api", "api_version is 0"),
    ],
)  # fmt: skip
def test_a_backend_that_cannot_load_says_why_when_asked_for(package: Path, mode: str, words: str) -> None:
    code = (
        "import glm5sdk, torch; from glm5sdk import ops; from glm5sdk.core.errors import UnavailableError\n"
        "ops.add(torch.ones(1, 1), torch.ones(1, 1))\n"  # nobody asked: nobody suffers
        "try: glm5sdk.use('toy')\n"
        "except UnavailableError as error: print(error)"
    )
    done = run(package, mode, "-c", code)
    assert words in done.stdout, done
