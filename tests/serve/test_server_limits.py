"""Keys, queues, time, draining, metrics, origins, and the administrator's routes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from prometheus_client.parser import text_string_to_metric_families
from server_fakes import Bench

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.interface import OverloadedError
from glm5sdk.serve.server import ServerSettings
from glm5sdk.serve.server.auth import Keys
from glm5sdk.serve.server.errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {"api_keys": ("first", "second"), "admin_key": "boss"}


def status(bench: Bench, path: str, method: str = "POST", **headers: str) -> int:
    answer = bench.post(path, CHAT, **headers) if method == "POST" else bench.get(path, **headers)
    return answer.status_code


def test_keys_open_what_they_are_for() -> None:
    bench = Bench("</think>x", **KEYS)
    chat = "/v1/chat/completions"
    assert status(bench, chat) == 401
    assert status(bench, chat, authorization="Bearer wrong") == 401
    assert status(bench, chat, authorization="first") == 401
    for headers in (
        {"authorization": "Bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "first"},
        {"authorization": "Bearer boss"}, {"authorization": "Bearer none", "x-api-key": "second"},
    ):  # fmt: skip
        assert status(bench, chat, **headers) == 200
    for path in ("/health", "/metrics"):
        assert status(bench, path, "GET") == 200
    for path in ("/v1/models", "/version", "/openapi.json", "/nope"):
        assert status(bench, path, "GET") == 401
    assert status(bench, "/admin/stats", "GET") == 401
    assert status(bench, "/admin/stats", "GET", **{"x-api-key": "first"}) == 403
    assert status(bench, "/admin/stats", "GET", **{"x-api-key": "boss"}) == 200
    refusal = bench.post("/v1/messages", {})
    assert refusal.json()["error"]["type"] == "authentication_error" and refusal.json()["type"] == "error"
    assert bench.get("/v1/models").headers["www-authenticate"] == "Bearer"


def test_keys_of_any_bytes_are_wrong_keys() -> None:
    keys = Keys(("first",), None)
    for text in ("Bearer f\xf6rst", "Bearer \udcff", "Bearer ", "", "Bearer first first"):
        with pytest.raises(ApiError) as refusal:
            keys.check("/v1/models", {"authorization": text})
        assert refusal.value.status == 401


def test_without_an_admin_key_nobody_is_administrator() -> None:
    bench = Bench("</think>x")
    assert status(bench, "/v1/chat/completions") == 200
    assert status(bench, "/admin/pause") == 403
    assert not bench.engine.controls


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_names": ()}, {"api_keys": (" ",)}, {"admin_key": "ü"}, {"max_body_bytes": 0}, {"request_timeout": 0},
        {"max_queued_requests": -1}, {"drain_seconds": -1},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="server: "):
        ServerSettings(**wrong)


def together(bench: Bench, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """Requests that all wait in the engine until the last has been answered or taken in."""

    async def call() -> list[httpx.Response]:
        bench.engine.gate, bench.engine.held = asyncio.Event(), True
        async with bench.client() as client:
            tasks = []
            for body in bodies:
                tasks.append(asyncio.ensure_future(client.post("/v1/completions", json=body)))
                for _ in range(20):
                    await asyncio.sleep(0)
            bench.engine.gate.set()
            return await asyncio.gather(*tasks)

    return asyncio.run(call())


def test_too_many_sequences_are_told_to_come_back() -> None:
    bench = Bench("x", max_queued_requests=2)  # and four run at once
    answers = together(bench, [{"prompt": "a"}] * 8)
    assert [answer.status_code for answer in answers] == [200] * 6 + [429] * 2
    refusal = answers[-1]
    assert int(refusal.headers["retry-after"]) >= 1
    assert refusal.json()["error"]["type"] == "rate_limit_error" and refusal.json()["error"]["code"] == "overloaded"
    assert together(bench, [{"prompt": "a"}] * 6)[-1].status_code == 200, "all places are free again"


def test_one_prompt_alone_is_always_taken() -> None:
    bench = Bench("x", max_queued_requests=0, max_queued_tokens=10)
    assert together(bench, [{"prompt": "a" * 100, "n": 4}])[0].status_code == 200
    assert [answer.status_code for answer in together(bench, [{"prompt": "a" * 8}, {"prompt": "a" * 8}])] == [200, 429]
    assert [answer.status_code for answer in together(bench, [{"prompt": "a", "n": 4}, {"prompt": "a"}])] == [200, 429]


def test_what_can_never_wait_is_the_clients_mistake() -> None:
    bench = Bench("x", max_queued_requests=10, max_queued_tokens=100)
    assert bench.post("/v1/completions", {"prompt": ["a"] * 7, "n": 2}).status_code == 200
    for body in ({"prompt": ["a"] * 8, "n": 2}, {"prompt": ["a" * 1400] * 3}):
        refusal = bench.post("/v1/completions", body)
        assert refusal.status_code == 400 and "needs at most" in refusal.text


def test_the_engines_own_queue_counts_and_refuses() -> None:
    bench = Bench("x", max_queued_requests=2)
    bench.engine.numbers.waiting = 2
    assert bench.post("/v1/completions", {"prompt": "a"}).status_code == 429, "others fill the engine"
    assert bench.chat("x" * 100_000).status_code == 429, "before the prompt is looked at"
    bench.engine.numbers.waiting = 0
    bench.engine.fail = OverloadedError("engine: the queue is full", 7.2)
    answer = bench.post("/v1/messages", {**CHAT, "max_tokens": 5})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    streamed = bench.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert streamed.status_code == 429, "refused before the stream begins"


def test_a_request_takes_no_longer_than_allowed() -> None:
    bench = Bench("</think>abc", request_timeout=0.2)

    async def call(**more: Any) -> httpx.Response:
        bench.engine.gate = asyncio.Event()
        async with bench.client() as client:
            return await client.post("/v1/chat/completions", json={**CHAT, **more})

    answer = asyncio.run(call())
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "request_timeout"
    assert len(bench.engine.aborted) >= 1
    streamed = asyncio.run(call(stream=True))
    assert streamed.status_code == 200 and '"code":"request_timeout"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert bench.service.in_flight == 0 and not bench.service.alive


def test_abort_ends_an_answer() -> None:
    bench = Bench("</think>abc")

    async def call() -> tuple[dict[str, Any], dict[str, Any]]:
        bench.engine.gate = asyncio.Event()
        async with bench.client() as client:
            running = asyncio.ensure_future(client.post("/v1/chat/completions", json={**CHAT, "request_id": "me"}))
            while not bench.service.alive:
                await asyncio.sleep(0.01)
            ended = await client.post("/abort", json={"request_id": "chatcmpl-me"})
            unknown = await client.post("/abort", json={"request_id": "nobody"})
            bench.engine.gate.set()
            await running
            return ended.json(), unknown.json()

    ended, unknown = asyncio.run(call())
    assert ended["aborted"] == 1 and unknown["aborted"] == 0
    assert bench.engine.aborted == ["chatcmpl-me"]


def test_the_same_request_id_twice_at_once_is_refused() -> None:
    bench = Bench("x")
    answers = together(bench, [{"prompt": "a", "request_id": "me"}] * 2)
    assert [answer.status_code for answer in answers] == [200, 400]


def test_draining_takes_nothing_new() -> None:
    bench = Bench("</think>x", admin_key="boss")
    boss = {"x-api-key": "boss"}
    assert bench.post("/admin/drain", b"", **boss).json() == {"draining": True, "in_flight": 0}
    refusal = bench.chat()
    assert refusal.status_code == 503 and "retry-after" in refusal.headers
    assert bench.get("/health").status_code == 503
    assert bench.get("/metrics").status_code == 200
    assert bench.post("/admin/drain", {"draining": False}, **boss).json()["draining"] is False
    assert bench.chat().status_code == 200 and bench.get("/health").status_code == 200


def test_a_stopped_engine_is_not_healthy() -> None:
    bench = Bench()
    bench.engine.failure = "MemoryError"  # type: ignore[attr-defined]
    assert bench.get("/health").status_code == 503


def test_admin_routes_call_the_engine() -> None:
    bench = Bench("</think>x", admin_key="boss")
    boss = {"x-api-key": "boss"}
    for path, body in (
        ("pause", b""), ("resume", {}), ("update_weights", {"path": "p", "version": "w2"}),
        ("swap_experts", {"layer": 3}), ("control", {"command": "flush_cache"}),
    ):  # fmt: skip
        assert bench.post(f"/admin/{path}", body, **boss).status_code == 200
    assert bench.engine.controls == [
        ("pause", {}), ("resume", {}), ("update_weights", {"path": "p", "version": "w2"}),
        ("swap_experts", {"layer": 3}), ("flush_cache", {}),
    ]  # fmt: skip
    unknown = bench.post("/admin/control", {"command": "unknown"}, **boss)
    assert unknown.status_code == 400 and "unknown" in unknown.text
    assert bench.post("/admin/update_weights", b"[]", **boss).status_code == 400


def test_adapters_are_models() -> None:
    bench = Bench("</think>x", admin_key="boss")
    boss = {"x-api-key": "boss"}
    assert bench.chat(model="poet").status_code == 404
    assert bench.post("/admin/load_adapter", {"name": "tiny", "path": "p"}, **boss).status_code == 400
    assert bench.post("/admin/load_adapter", {"name": "poet", "path": "p"}, **boss).status_code == 200
    assert [card["id"] for card in bench.get("/v1/models").json()["data"]] == ["tiny", "poet"]
    assert bench.chat(model="poet").json()["model"] == "poet"
    assert bench.engine.requests[-1][2]["adapter"] == "poet"
    assert bench.post("/admin/unload_adapter", {"name": "poet"}, **boss).status_code == 200
    assert bench.post("/admin/unload_adapter", {"name": "poet"}, **boss).status_code == 404
    assert bench.chat(model="poet").status_code == 404


def numbers(bench: Bench) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(bench.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "le")
            if not sample.name.endswith(("_bucket", "_created")):
                found[sample.name + (f"[{labels}]" if labels else "")] = sample.value
    return found


def test_metrics() -> None:
    bench = Bench("</think>abc", pace=2)
    stats = bench.engine.numbers
    stats.running, stats.waiting, stats.prompt_tokens, stats.cached_tokens = 3, 2, 100, 25
    stats.drafted_tokens, stats.accepted_tokens, stats.aborted, stats.rejected = 8, 6, 4, 5
    bench.chat()
    bench.chat(stream=True)
    bench.get("/a-path-nobody-serves")
    found = numbers(bench)
    assert found["glm5_num_requests_running"] == 3 and found["glm5_num_requests_waiting"] == 2
    assert found["glm5_kv_cache_usage_perc"] == 0.25
    assert found["glm5_prefix_cache_hit_rate"] == 0.25 and found["glm5_spec_decode_acceptance_rate"] == 0.75
    assert found["glm5_requests_aborted_total"] == 4 and found["glm5_requests_rejected_total"] == 5
    made = len(bench.text.tokenizer.encode("</think>abc")) + 1
    prompt = len(bench.engine.requests[0][0])
    assert found["glm5_request_generation_tokens_sum"] == 2 * made
    assert found["glm5_request_prompt_tokens_sum"] == 2 * prompt
    assert found["glm5_time_to_first_token_seconds_count"] == found["glm5_e2e_request_latency_seconds_count"] == 2
    assert found["glm5_request_queue_time_seconds_count"] == 2
    assert found["glm5_inter_token_latency_seconds_count"] == 2 * (made - 2), "the first two came together"
    assert found["glm5_request_success_total[finished_reason=stop]"] == 2
    assert found["glm5_http_requests_total[route=/v1/chat/completions,status=200]"] == 2
    assert found["glm5_http_requests_total[route=unknown,status=404]"] == 1
    assert found["glm5_weight_version_info[version=w1]"] == 1


def test_every_answer_says_which_weights_are_there() -> None:
    bench = Bench("</think>x", api_keys=("k",))
    bench.engine.numbers.weight_version = "w\u00f62\r\nx: y"
    for answer in (
        bench.get("/health"),
        bench.get("/nope"),
        bench.chat(),
        bench.get("/v1/models", **{"x-api-key": "k"}),
    ):
        assert answer.headers["x-glm5-weight-version"] == "w?2??x: y"
    answer = bench.post("/v1/completions", {"prompt": "a", "request_id": "\u00fc"}, **{"x-api-key": "k"})
    assert answer.headers.get_list("x-glm5-weight-version") == ["w?2??x: y"]
    assert answer.headers["x-request-id"] == "cmpl-?" and answer.json()["id"] == "cmpl-\u00fc"


def test_origins_are_closed_unless_named() -> None:
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in Bench("</think>x").get("/health", **origin).headers
    bench = Bench("</think>x", allow_origins=("https://a.example",), api_keys=("k",))
    assert bench.get("/health", **origin).headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in bench.get("/health", origin="https://b.example").headers

    async def preflight() -> httpx.Response:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        async with bench.client(**origin, **ask) as client:
            return await client.options("/v1/chat/completions")

    assert asyncio.run(preflight()).status_code == 200
