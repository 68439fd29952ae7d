"""Chat templates that never end or grow without bound: a refusal within seconds, and the server goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from real_server import Offline, body_of, serving, until

TEMPLATE = """{%- if messages[0].content == 'loop' -%}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif messages[0].content == 'grow' -%}{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}
{%- elif messages[0].content == 'power' -%}{{ (9 * messages|length) ** (9 ** 9) }}
{%- elif messages[0].content == 'write' -%}{{ 'x' * 10 ** 11 }}
{%- elif messages[0].content == 'escape' -%}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- else -%}{{ messages[0].content }}{%- endif -%}"""  # fmt: skip # noqa: E501


@pytest.mark.full  # each waits for a time limit
def test_they_end(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    with serving(fault_model, tmp_path / "log", "--chat-template", str(tmp_path / "template")) as server:
        with server.client(timeout=60) as client:
            before = server.resident_bytes()
            for word in ("loop", "grow", "power", "write", "escape", "fine"):
                begin = time.monotonic()
                body = {"messages": [{"role": "user", "content": word}], "max_tokens": 2}
                answer = client.post("/v1/chat/completions", json=body)
                took = time.monotonic() - begin
                assert answer.status_code == (200 if word == "fine" else 400), (word, answer.text[:300])
                assert took < 40, (word, took)
            answer = client.post("/v1/completions", json=body_of(1, 4))
            assert answer.json()["choices"][0]["token_ids"] == offline.tokens(1, 4)
        assert until(server.at_rest)
        assert server.resident_bytes() - before < 64 << 20
