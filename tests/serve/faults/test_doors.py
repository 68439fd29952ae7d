"""Keys at every door: each route of the table refuses who has none, and no key is written anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_server import serving
from server_fakes import Bench

from glm5sdk.serve.server import auth
from glm5sdk.serve.server.auth import OPEN_PATHS
from glm5sdk.serve.server.routes import ROUTES

KEY, ADMIN_KEY = "an-ordinary-key-4711", "an-admin-key-0815"


def walk(answer_to) -> None:
    """Every route with no key, wrong ones, and the ordinary one at the administrator's."""
    wrong = [{}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": f"Bearer {KEY}x"},
             {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY[:-1]}"}, {"x-api-key": KEY.upper()},
             {"cookie": f"key={KEY}"}, {"x-admin-key": ADMIN_KEY}]  # fmt: skip
    paths = [(route.method, route.path) for route in ROUTES] + [("GET", "/openapi.json"), ("GET", "/admin/none")]
    for method, path in paths:
        path = path.replace("{name:path}", "x").replace("{response_id}", "x").replace("{lease_id}", "x")
        if path in OPEN_PATHS:
            assert answer_to(method, path, {}).status_code == 200
            continue
        for headers in wrong:
            answer = answer_to(method, path, headers)
            assert answer.status_code == 401, (method, path, headers, answer.text[:200])
            assert KEY not in answer.text and ADMIN_KEY not in answer.text
        known = answer_to(method, path, {"authorization": f"Bearer {KEY}"}).status_code
        assert (known == 403) if path.startswith("/admin/") else (known not in (401, 403)), (method, path, known)


def test_every_route_of_the_server() -> None:
    import asyncio

    bench = Bench(api_keys=(KEY,), admin_key=ADMIN_KEY)

    def answer_to(method: str, path: str, headers: dict[str, str]):
        async def call():
            async with bench.client() as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(call())

    walk(answer_to)


SPELLINGS = ["//admin/stats", "/admin//stats", "/%61dmin/stats", "/x/../admin/stats", "/ADMIN/stats", "/admin/stats/"]
SPELLINGS += ["/admin;x/stats", "/v1/models/../../admin/stats", "/admin%2fstats"]


@pytest.mark.parametrize("path", SPELLINGS)
def test_other_spellings_of_the_administrators_door(path: str) -> None:
    bench = Bench(api_keys=(KEY,), admin_key=ADMIN_KEY)
    answer = bench.get(path, authorization=f"Bearer {KEY}")
    assert answer.status_code in (307, 403, 404), answer.text
    assert "pages_total" not in answer.text


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function made for it, on digests, and the last ones also when the first one fits."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = auth.Keys([KEY, "second", "third"], ADMIN_KEY)
    keys.check("/v1/models", {"authorization": f"Bearer {KEY}"})
    assert len({b for _, b in compared}) == 4
    assert {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.full  # two processes
@pytest.mark.parametrize("dp", [1, 2])
def test_keys_are_not_logged(fault_model: Path, tmp_path: Path, dp: int) -> None:
    """Neither in the log nor, of those that the environment gave, in a command line."""
    keys = {"GLM5SDK_API_KEY": KEY, "GLM5SDK_ADMIN_KEY": ADMIN_KEY}
    options = ["--access-log", "--num-pages", "32", *(["--dp", str(dp)] if dp > 1 else [])]
    with serving(fault_model, tmp_path / "log", *options, **keys) as server:
        with server.client(headers={}) as client:
            for key in (KEY, ADMIN_KEY, f"{KEY}x"):
                for path in ("/v1/models", "/admin/stats", "/nowhere"):
                    client.get(path, headers={"authorization": f"Bearer {key}"})
                    client.get(path, headers={"x-api-key": key})
            client.post("/v1/completions", json={"prompt": 5}, headers={"x-api-key": KEY})
        lines = [
            p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if str(fault_model).encode() in p.read_bytes()
        ]
        assert len(lines) >= dp
        for text in [(tmp_path / "log").read_text(), *(line.decode() for line in lines)]:
            assert KEY not in text and ADMIN_KEY not in text
