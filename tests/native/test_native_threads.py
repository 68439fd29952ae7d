"""The thread pool: same bits however work is split, alive after a fork, safe from several Python threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from glm5sdk.core.errors import ContractError


def product(native, level, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(301, 130, generator=generator)
    w = torch.randn(77, 130, generator=generator)
    y = torch.empty(301, 77)
    native.linear(level, x, w, None, y)
    return y


def test_thread_count_never_changes_a_bit(native, level):
    native.set_num_threads(1)
    want = product(native, level)
    for threads in (2, 3, 7):
        native.set_num_threads(threads)
        assert torch.equal(product(native, level), want)


def test_a_forked_child_starts_its_own_workers(native):
    native.set_num_threads(3)
    want = product(native, 0)
    pid = os.fork()
    if pid == 0:
        native.set_num_threads(2)
        same = all(torch.equal(product(native, 0), want) for _ in range(3))
        os._exit(0 if same else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(product(native, 0), want)


def test_four_python_threads_at_once(native, level):
    native.set_num_threads(2)
    want = [product(native, level, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: product(native, level, i % 4), range(40)))
    assert all(torch.equal(y, want[i % 4]) for i, y in enumerate(got))


def test_thread_count_follows_the_environment():
    code = "from glm5sdk_cpu import _C; print(_C.get_num_threads())"
    out = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert int(out) == 1
    out = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "4096"})
    assert 1 <= int(out) <= len(os.sched_getaffinity(0))


def test_thread_count_follows_torch_until_it_is_set():
    code = """
import torch, glm5sdk
from glm5sdk_cpu import _C
glm5sdk.backends()["cpu"].impls
seen = []
for n in (1, 2, 1):
    torch.set_num_threads(n)
    seen.append(_C.get_num_threads())
_C.set_num_threads(3)
torch.set_num_threads(1)
print(*seen, _C.get_num_threads())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split()
    most = min(2, len(os.sched_getaffinity(0)))
    assert [int(n) for n in out] == [1, most, 1, 3]


def test_an_idle_pool_sleeps(native):
    native.set_num_threads(3)
    product(native, 0)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_a_senseless_thread_count_is_refused(native):
    with pytest.raises(ContractError, match="needs 1 or more"):
        native.set_num_threads(0)


@pytest.mark.parametrize("threads", [1, 4])
def test_denormals_survive_whatever_the_host_has_set(native, level, threads):
    native.set_num_threads(threads)
    x = torch.full((1 << 17,), 1e-40)
    z = torch.empty_like(x)
    torch.set_flush_denormal(True)
    try:
        native.add(level, x, x, z)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(z, torch.full_like(z, 1e-40) * 2)
    assert (z > 0).all()
