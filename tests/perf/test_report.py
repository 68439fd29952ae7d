"""Reports of `glm5 bench`: the arithmetic of costs, and every way in which files and workloads are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.perf.report import Prices, Report, Results, Workload, compare, per_million, read_prices, read_report

WORKLOAD = Workload("tiny", "abc", "float32", 2, 16, 8)
SLOW = Report("old box", WORKLOAD, Results(1000.0, 100.0, 0.5, 0.02, 0.03), {"threads": 2})
FAST = Report("new box", WORKLOAD, Results(4000.0, 250.0, 0.1, 0.008, 0.01), {"threads": 16})
PRICES = Prices("EUR", {"old box": 0.36, "new box": 1.8}, "prices.toml")


def test_costs_against_numbers_made_by_hand() -> None:
    old, new = compare([SLOW, FAST], PRICES)
    # 0.36 an hour is 0.0001 a second; at 100 tokens a second a token costs 1e-6, a million 1.
    assert (old.speedup, new.speedup) == (1.0, 2.5)
    assert (old.new_cost, old.prompt_cost) == (pytest.approx(1.0), pytest.approx(0.1))
    assert (new.new_cost, new.prompt_cost) == (pytest.approx(2.0), pytest.approx(0.125))


def test_without_prices_there_are_no_costs() -> None:
    assert [(c.prompt_cost, c.new_cost) for c in compare([SLOW, FAST])] == [(None, None), (None, None)]


@given(st.floats(0.01, 100), st.floats(0.1, 1e6), st.floats(1.1, 10))
def test_cost_is_price_over_speed(price: float, speed: float, factor: float) -> None:
    tokens_in_an_hour = speed * 3600
    assert per_million(price, speed) * tokens_in_an_hour / 1e6 == pytest.approx(price)
    assert per_million(price * factor, speed * factor) == pytest.approx(per_million(price, speed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 3}, "batch is 3, needs 2"),
        ({"prompt_tokens": 17}, "prompt_tokens is 17, needs 16"),
        ({"new_tokens": 9}, "new_tokens is 9, needs 8"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', needs 'float32'"),
        ({"model": "large"}, "model is 'large', needs 'tiny'"),
        ({"fingerprint": "xyz"}, "fingerprint is 'xyz', needs 'abc'"),
        ({"batch": 3, "new_tokens": 9}, "batch is 3, needs 2; new_tokens is 9, needs 8"),
    ],
)
def test_other_work_is_not_compared(changes: dict[str, Any], message: str) -> None:
    other = replace(FAST, workload=replace(WORKLOAD, **changes))
    with pytest.raises(ContractError) as caught:
        compare([SLOW, other])
    assert str(caught.value) == f"compare: the work of new box is not that of old box: {message}"


def test_one_report_is_no_comparison() -> None:
    with pytest.raises(ContractError, match="compare: reports is 1, needs at least 2"):
        compare([SLOW])


def test_a_machine_without_a_price_is_named() -> None:
    prices = Prices("EUR", {"old box": 1.0, "other": 2.0}, "prices.toml")
    with pytest.raises(ContractError, match=r"prices: prices.toml has old box, other, needs 'new box'"):
        compare([SLOW, FAST], prices)
    with pytest.raises(ContractError, match="has no machine, needs 'old box'"):
        compare([SLOW, FAST], Prices("EUR", {}, "empty.toml"))


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    FAST.save(path)
    assert read_report(path) == FAST


REMOVED = object()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("format",), "glm5-bench/9", "format of {path} is 'glm5-bench/9', needs 'glm5-bench/1'"),
        (("format",), REMOVED, "format of {path} is None"),
        (("hardware",), "", "hardware in {path} is '', needs a text"),
        (("hardware",), 3, "hardware in {path} is 3, needs a text"),
        (("machine",), [], "machine in {path} is [], needs a table"),
        (("workload",), REMOVED, "workload in {path} is None, needs a table"),
        (("workload", "batch"), 0, "batch in {path} is 0, needs a count of at least 1"),
        (("workload", "batch"), True, "batch in {path} is True, needs a count"),
        (("workload", "prompt_tokens"), 1.5, "prompt_tokens in {path} is 1.5, needs a count"),
        (("workload", "dtype"), REMOVED, "dtype in {path} is None, needs a text"),
        (("results",), "fast", "results in {path} is 'fast', needs a table"),
        (("results", "decode_tokens_per_second"), 0, "decode_tokens_per_second in {path} is 0, needs a number above 0"),
        (("results", "token_seconds"), float("nan"), "token_seconds in {path} is nan, needs a number above 0"),
        (("results", "token_seconds"), float("inf"), "token_seconds in {path} is inf, needs a number above 0"),
        (("results", "first_token_seconds"), "1", "first_token_seconds in {path} is '1', needs a number above 0"),
        (("results", "prefill_tokens_per_second"), REMOVED, "prefill_tokens_per_second in {path} is None"),
    ],
)
def test_a_damaged_report_is_refused(tmp_path: Path, where: tuple[str, ...], value: object, message: str) -> None:
    path = tmp_path / "report.json"
    content = FAST.to_dict()
    inner = content
    for name in where[:-1]:
        inner = inner[name]
    if value is REMOVED:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ContractError) as caught:
        read_report(path)
    assert message.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"{", "is malformed"), (b"[]", "is a list, needs a table"), (b"\xff\xfe", "is malformed"), (b"", "is malformed")],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(text)
    with pytest.raises(ContractError, match=message):
        read_report(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for read in (read_report, read_prices):
        with pytest.raises(ContractError, match=r"nowhere.json is not readable \(No such file"):
            read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prices.toml", 'currency = "EUR"\n"old box" = 0.36\nnew = 2\n'),
        ("prices.json", '{"currency": "EUR", "old box": 0.36, "new": 2}'),
    ],
)
def test_prices_are_read_from_both_kinds_of_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    prices = read_prices(path)
    assert prices == Prices("EUR", {"old box": 0.36, "new": 2.0}, str(path))
    assert prices.of("old box") == 0.36


def test_the_currency_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("box = 1")
    assert read_prices(path).currency == "units"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("prices.toml", "box 1", "is malformed"),
        ("prices.toml", "box = 1\nbox = 2", "is malformed"),
        ("prices.json", "box = 1", "is malformed"),
        ("prices.json", "[1]", "is a list, needs a table"),
        ("prices.toml", "box = 0", "prices: box in .* is 0, needs a number above 0"),
        ("prices.toml", "box = -1.5", "prices: box in .* is -1.5, needs a number above 0"),
        ("prices.toml", "box = nan", "prices: box in .* is nan"),
        ("prices.toml", "box = true", "prices: box in .* is True"),
        ("prices.toml", "box = '1 EUR'", "prices: box in .* is '1 EUR'"),
        ("prices.toml", "[box]\nprice = 1", "prices: box in .* is {'price': 1}"),
        ("prices.toml", "currency = 1", "currency in .* is 1, needs a text"),
    ],
)
def test_malformed_prices_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ContractError, match=message):
        read_prices(path)
