"""The chat page, in a real browser where there is one."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from live_server import live, until
from server_fakes import Bench

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
EVIL = (
    "weigh it <b>up</b></think># Title\n\nSome **bold** and `code` <img src=x onerror='window.hacked=1'>\n"
    "<script>window.hacked=2</script>\n\n- one\n- [bad](javascript:window.hacked=3)\n- [good](https://example.com/a)\n\n"
    "```html\n<script>window.hacked=4</script>\n```\n\n1. first\n2. second\n\n> quoted"
)


def test_the_page_is_one_file_under_a_strict_policy() -> None:
    answer = Bench(api_keys=("k",)).get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 2
    assert "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)[^"']*["']""", answer.text), "nothing is loaded"
    assert "innerHTML" not in answer.text and "insertAdjacentHTML" not in answer.text
    assert not re.findall(r"""\s(?:style|on\w+)\s*=\s*["']""", answer.text), "the policy forbids them"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; its tests are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as run:
        started = run.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page that must not complain, nor ask anybody but its own server."""
    context = browser.new_context(viewport={"width": 1100, "height": 780})
    page = context.new_page()
    page.complaints, page.asked = [], set()
    page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.add(request.url.split("/")[2]))
    yield page
    context.close()


def say(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def test_a_conversation(tab: Any) -> None:
    bench = Bench(EVIL, pace=3)
    with live(bench) as address:
        tab.goto(address)
        tab.wait_for_selector("#model:text-is('tiny')")
        say(tab, "hello <i>there</i>")
        tab.wait_for_selector(".foot .facts")
        assert tab.inner_text(".turn.user .said") == "hello <i>there</i>"
        assert tab.inner_text(".said h2") == "Title"
        assert tab.inner_text(".said strong") == "bold"
        assert tab.locator(".said ul li").count() == 3 and tab.locator(".said ol li").count() == 2
        assert tab.inner_text(".block pre") == "<script>window.hacked=4</script>"
        assert tab.inner_text(".said blockquote") == "quoted"
        assert tab.locator(".said a").evaluate_all("links => links.map(link => link.href)") == ["https://example.com/a"]
        assert tab.locator(".said img, .said script, .thought b").count() == 0
        assert tab.evaluate("window.hacked") is None
        assert "Thought for" in tab.inner_text(".thought summary")
        assert not tab.locator(".thought .inside").is_visible()
        tab.click(".thought summary")
        assert tab.inner_text(".thought .inside") == "weigh it <b>up</b>"
        say(tab, "again")
        tab.locator(".foot .facts").nth(1).wait_for()
        assert tab.complaints == [] and tab.asked == {address.removeprefix("http://")}
    prompt = bench.text.tokenizer.decode(bench.engine.requests[1][0], skip_special_tokens=False)
    assert prompt.count("<|user|>") == 2 and "# Title" in prompt and prompt.endswith("again<|assistant|><think>")


def test_stop_settings_key_and_new_chat(tab: Any) -> None:
    bench = Bench("a long thought</think>answer", api_keys=("secret",))
    bench.engine.gate = asyncio.Event()
    with live(bench) as address:
        tab.goto(address)
        say(tab, "hi")
        tab.wait_for_selector(".wrong")
        assert "API key" in tab.inner_text(".wrong")
        tab.click("#settings")
        given = {"key": "secret", "system": "be brief", "temperature": "0.5", "top_p": "0.9", "max_tokens": "50"}
        for name, value in {**given, "seed": "7"}.items():
            tab.fill(f"#{name}", value)
        tab.click(".close")
        tab.wait_for_selector("#model:text-is('tiny')")
        tab.click("text=Try again")
        tab.wait_for_selector("#stop:visible")
        assert until(lambda: len(bench.engine.requests) == 1)
        tab.wait_for_selector(".thought:visible")
        tab.click("#stop")
        tab.wait_for_selector(".facts:has-text('stopped')")
        assert until(lambda: bool(bench.engine.aborted)), "the engine was told"
        ids, params, _ = bench.engine.requests[0]
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 50, 7)
        assert "<|system|>be brief<|user|>hi<" in bench.text.tokenizer.decode(ids, skip_special_tokens=False)
        tab.click("#new")
        assert tab.locator(".turn").count() == 0 and tab.locator("#empty").is_visible()
        before = tab.evaluate("document.documentElement.dataset.theme")
        tab.click("#theme")
        assert {before, tab.evaluate("document.documentElement.dataset.theme")} == {"light", "dark"}


def test_an_error_in_the_stream_is_shown(tab: Any) -> None:
    bench = Bench("</think>half an answer")
    bench.engine.broken = "the engine is out of luck"
    with live(bench) as address:
        tab.goto(address)
        say(tab, "hi")
        tab.wait_for_selector(".wrong")
        assert tab.inner_text(".wrong") == "the engine is out of luck"
        assert not tab.locator("#stop").is_visible() and tab.locator("#send").is_visible()
