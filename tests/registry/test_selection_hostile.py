"""Scopes of selection under threads, tasks and forks; the pool of threads under signals and odd environments."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import glm5sdk
from glm5sdk import ops
from glm5sdk.registry.select import current_use

X, W = torch.randn(64, 256), torch.randn(256, 256)


def test_one_scope_object_serves_many_threads_and_tasks() -> None:
    scopes = {name: glm5sdk.use(name) for name in ("reference", "composed")}
    failures: list[str] = []

    def check(name: str) -> None:
        if current_use() != (name,):
            failures.append(f"{name}: {current_use()}")

    def thread(name: str) -> None:
        try:
            for _ in range(200):
                with scopes[name]:
                    time.sleep(0)
                    check(name)
                    with scopes["reference"]:
                        check("reference")
                    check(name)
        except Exception as error:  # noqa: BLE001  a thread reports, whatever it was
            failures.append(repr(error))

    threads = [threading.Thread(target=thread, args=(name,)) for name in [*scopes] * 3]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)

    async def task(name: str) -> None:
        for _ in range(20):
            with scopes[name]:
                await asyncio.sleep(0)
                check(name)

    async def tasks() -> None:
        await asyncio.gather(*(task(name) for name in [*scopes] * 3))

    asyncio.run(tasks())
    assert not failures, failures[:3]
    assert current_use() == ()


def test_a_scope_ends_when_an_exception_leaves_it() -> None:
    scope = glm5sdk.use("reference")
    with pytest.raises(KeyError), scope, scope:
        raise KeyError
    assert current_use() == ()


def test_forks_while_other_threads_compute() -> None:
    """A child starts with a pool of its own, wherever the parent's threads were."""
    want, stop = ops.linear(X, W), threading.Event()

    def work() -> None:
        while not stop.is_set():
            ops.linear(X, W)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for w in workers:
        w.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                os._exit(0 if torch.equal(ops.linear(X, W), want) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for w in workers:
            w.join()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


SUM = "import torch; from glm5sdk import ops; print(int(ops.linear(torch.ones(64, 64), torch.ones(64, 64)).sum()))"


@pytest.mark.parametrize("threads", ["1", "2,1", "0", "-3", "many", "", "99999999999"])
def test_any_number_of_threads_in_the_environment(threads: str) -> None:
    assert run(SUM, OMP_NUM_THREADS=threads).stdout.strip() == "262144"


@pytest.mark.parametrize("names", ["nope", "cpu.nope", ".", "reference.x", "REFERENCE", "reference,nope"])
def test_unknown_backends_in_the_environment(names: str) -> None:
    result = run(SUM, GLM5SDK_BACKENDS=names)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "GLM5SDK_BACKENDS" in last and "needs one of" in last


@pytest.mark.parametrize("names", ["", ",,,", "reference", " reference , composed "])
def test_known_backends_in_the_environment(names: str) -> None:
    assert run(SUM, GLM5SDK_BACKENDS=names).stdout.strip() == "262144"


def test_an_interrupt_arrives_and_the_next_call_works() -> None:
    code = (
        "import os, signal, threading, torch; from glm5sdk import ops\n"
        "x, w = torch.randn(512, 512), torch.randn(512, 512); ops.linear(x, w)\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    while True: ops.linear(x, w)\n"
        "except KeyboardInterrupt: print(ops.linear(x, w).shape[0])"
    )
    assert run(code).stdout.strip() == "512"
