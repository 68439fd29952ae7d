"""Hostile templates are refused quickly, and leave the process that asked unharmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError
from glm5sdk.text import ChatTemplate, TemplateLimits, chat_worker

LIMITS = TemplateLimits(seconds=0.3, output_chars=1 << 20, memory_bytes=1 << 28)

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ namespace.__init__ }}",
    "{{ (''|attr('__class__')) }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{{ ['{0.__class__}'] | map('format', 1) | first }}{{ ''['__class__'] and ''.__class__ }}",
    "{{ self.__init__ }}",
    "{% set n = namespace(__class__=1) %}{{ n.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ (lambda: 1)() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends 'x' %}",
]
TIME = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(90) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
    "{% endfor %}{{ n.x == n.y }}",
    "{{ 3 ** (10 ** 8) > 1 }}",
    "{% for a in range(9999) if ([0] * 9999999) | sum %}{% endfor %}",
]
SIZE = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ ('a' * 9999).replace('a', 'b' * 999999) }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'a' * 2000000 }}",
]


def _refused(source: str, errors: type[Exception] | tuple[type[Exception], ...]) -> None:
    begin = time.monotonic()
    with pytest.raises(errors, match="chat template: "):
        ChatTemplate(source, limits=LIMITS).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - begin < 30  # far above what it takes, far below what it asks for


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused(source: str) -> None:
    try:
        text = ChatTemplate(source, limits=LIMITS).render([{"role": "user", "content": "x"}])
    except (CheckpointError, ContractError) as error:
        assert str(error).startswith("chat template: ")  # noqa: PT017 - some render to nothing instead
    else:
        assert text == ""


@pytest.mark.parametrize("source", TIME)
def test_endless_work_is_refused(source: str) -> None:
    _refused(source, CapacityError)


@pytest.mark.parametrize("source", SIZE)
def test_endless_output_is_refused(source: str) -> None:
    _refused(source, (CapacityError, ContractError))


@pytest.mark.parametrize(
    "source", ["{{" + "(" * 60000, "{{ " + "-" * 60000 + "1 }}", "{% if 1 %}" * 9000, "{{ 1" + "0" * 9999 + " }}"]
)
def test_a_monstrous_source_is_refused(source: str) -> None:
    _refused(source, (CheckpointError, CapacityError))


@pytest.mark.smoke
def test_the_next_rendering_works_after_one_was_killed() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}ok", limits=LIMITS)
    assert template.render([], n=1) == "ok"
    with pytest.raises(CapacityError, match=r"time is over 0\.3 s"):
        template.render([], n=99999)
    assert template.render([], n=2) == "ok"
    template.close()
    assert template.render([], n=2) == "ok"


def test_a_worker_killed_from_outside_is_replaced() -> None:
    template = ChatTemplate("ok")
    os.kill(template._process._process.pid, signal.SIGKILL)
    template._process._process.wait()
    assert template.render([]) == "ok"


def test_the_worker_ends_with_its_template() -> None:
    template = ChatTemplate("ok")
    worker = template._process._process
    del template
    assert worker.poll() is not None


def test_threads_take_turns() -> None:
    template = ChatTemplate("{{ n }}" * 50)
    got: dict[int, set[str]] = {}

    def work(n: int) -> None:
        got[n] = {template.render([], n=n) for _ in range(20)}

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: {str(n) * 50} for n in range(4)}


def test_a_forked_child_gets_a_worker_of_its_own() -> None:
    template = ChatTemplate("{{ n }}")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if template.render([], n=7) == "7" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template.render([], n=8) == "8"


def test_inside_the_worker_nothing_can_be_opened() -> None:
    # What an escape from the sandbox would find: run the worker's own restriction, then try.
    program = f"""
import runpy, socket, subprocess
restrict = runpy.run_path({chat_worker.__file__!r})["restrict"]
restrict(1 << 30)
run, fill = lambda: subprocess.run(["/bin/true"]), lambda: bytearray(1 << 31)
for attempt in (lambda: open("/etc/hostname"), socket.socket, run, fill):
    try:
        attempt()
    except (OSError, MemoryError) as error:
        print(type(error).__name__)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["OSError", "OSError", "OSError", "MemoryError"]
