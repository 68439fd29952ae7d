"""The compiled module of the CPU backend; these tests call its kernels below the op layer."""

from __future__ import annotations

import pytest

_C = pytest.importorskip("glm5sdk_cpu._C", reason="the CPU backend is not built")


@pytest.fixture
def native():
    """The module, with its thread count restored after the test."""
    threads = _C.get_num_threads()
    yield _C
    _C.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`level` runs a test at every instruction level that this processor has."""
    if "level" in metafunc.fixturenames:
        names = ["baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"][: _C.cpu_level() + 1]
        metafunc.parametrize("level", range(len(names)), ids=names)
