"""What `glm5 bench` writes, and what machines cost per token: reports of the same work, side by side."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import ContractError

__all__ = ["Comparison", "Prices", "Report", "Results", "Workload", "compare", "read_prices", "read_report"]

FORMAT = "glm5-bench/1"


@dataclass(frozen=True)
class Workload:
    """What was run; only reports of the same work can be compared.

    Attributes:
        model: name of the checkpoint's folder.
        fingerprint: of its config, so that another model of that name is not taken for it.
        dtype: of weights and activations.
        batch: requests at a time.
        prompt_tokens, new_tokens: of each request.
    """

    model: str
    fingerprint: str
    dtype: str
    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Results:
    """What it gave.

    Attributes:
        prefill_tokens_per_second: prompt tokens of all requests.
        decode_tokens_per_second: new tokens of all requests.
        first_token_seconds: from the prompt to the first token.
        token_seconds: median between two tokens of a request.
        token_seconds_p95: which 19 of 20 stay below.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    first_token_seconds: float
    token_seconds: float
    token_seconds_p95: float


@dataclass(frozen=True)
class Report:
    """One run on one machine.

    Attributes:
        hardware: name of the machine, by which a prices file knows it.
        workload, results: see there.
        machine: other facts (device, threads, versions, implementations); shown, never compared.
    """

    hardware: str
    workload: Workload
    results: Results
    machine: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The contents of the JSON file."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Prices:
    """What machines cost.

    Attributes:
        currency: as printed.
        per_hour: by the `hardware` of a report.
        source: the file, for messages.
    """

    currency: str
    per_hour: Mapping[str, float]
    source: str

    def of(self, hardware: str) -> float:
        """The price of an hour.

        Raises:
            ContractError: the file has none for this machine.
        """
        if hardware not in self.per_hour:
            known = ", ".join(sorted(self.per_hour)) or "no machine"
            raise ContractError(
                f"prices: {self.source} has {known}, needs {hardware!r}; "
                "name a machine as the file does with `glm5 bench --hardware NAME`"
            )
        return self.per_hour[hardware]


@dataclass(frozen=True)
class Comparison:
    """One machine's column.

    Attributes:
        report: its figures.
        speedup: decoded tokens a second over the first report's.
        prompt_cost, new_cost: of a million prompt or new tokens, in the currency; None without prices.
    """

    report: Report
    speedup: float
    prompt_cost: float | None
    new_cost: float | None


def compare(reports: Sequence[Report], prices: Prices | None = None) -> list[Comparison]:
    """Put reports of the same work side by side; the first is what the others are measured against.

    Args:
        reports: at least two.
        prices: adds costs: currency an hour / (tokens a second * 3600) * 1e6. A machine that serves nothing but
            prompts, or nothing but new tokens, would pay that much; a real mix lies between.

    Raises:
        ContractError: fewer than two reports, work that differs (the message names what), or a machine without price.
    """
    if len(reports) < 2:
        raise ContractError(f"compare: reports is {len(reports)}, needs at least 2")
    first = reports[0]
    for other in reports[1:]:
        mine, theirs = asdict(first.workload), asdict(other.workload)
        unlike = [f"{name} is {theirs[name]!r}, needs {mine[name]!r}" for name in mine if mine[name] != theirs[name]]
        if unlike:
            raise ContractError(
                f"compare: the work of {other.hardware} is not that of {first.hardware}: {'; '.join(unlike)}"
            )
    columns = []
    for report in reports:
        r = report.results
        hour = None if prices is None else prices.of(report.hardware)
        costs = (
            (None, None)
            if hour is None
            else tuple(per_million(hour, rate) for rate in (r.prefill_tokens_per_second, r.decode_tokens_per_second))
        )
        speedup = r.decode_tokens_per_second / first.results.decode_tokens_per_second
        columns.append(Comparison(report, speedup, *costs))
    return columns


def per_million(per_hour: float, tokens_per_second: float) -> float:
    """Cost of a million tokens on a machine of that price and speed, which must be positive."""
    return per_hour / (tokens_per_second * 3600) * 1e6


def read_report(path: Path) -> Report:
    """Read what `glm5 bench --json` wrote.

    Raises:
        ContractError: the file is missing, no JSON, of another format, or lacks a value; the message names it.
    """
    content = _table(path, "report", json.loads)
    if content.get("format") != FORMAT:
        raise ContractError(f"report: format of {path} is {content.get('format')!r}, needs {FORMAT!r}")
    workload, results = (_fields(path, content, name) for name in ("workload", "results"))
    texts = {name: _text(path, workload, name) for name in ("model", "fingerprint", "dtype")}
    counts = {name: _count(path, workload, name) for name in ("batch", "prompt_tokens", "new_tokens")}
    numbers = {name: _positive(path, "report", results, name) for name in Results.__dataclass_fields__}
    return Report(
        _text(path, content, "hardware"),
        Workload(**texts, **counts),
        Results(**numbers),
        _fields(path, content, "machine"),
    )


def read_prices(path: Path) -> Prices:
    """Read a prices file: TOML, or JSON when its name ends in .json; each machine's name -> its price of an hour.

    A key `currency` names the currency (by default "units"). In TOML, names with spaces go into quotes:

        currency = "EUR"
        "Intel(R) Xeon(R) Processor" = 0.40
        gpu-node = 3.9

    Raises:
        ContractError: the file is missing or malformed, or a price is not a positive number.
    """
    content = _table(path, "prices", json.loads if path.suffix == ".json" else tomllib.loads)
    currency = content.pop("currency", "units")
    if not isinstance(currency, str):
        raise ContractError(f"prices: currency in {path} is {currency!r}, needs a text")
    return Prices(currency, {name: _positive(path, "prices", content, name) for name in content}, str(path))


def _table(path: Path, what: str, parse: Any) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(f"{what}: {path} is not readable ({error.strerror}), needs a file") from error
    except (ValueError, RecursionError) as error:  # both decoders' errors and broken UTF-8 are ValueErrors
        kind = "TOML" if parse is tomllib.loads else "JSON"
        raise ContractError(f"{what}: {path} is malformed ({error}), needs {kind}") from error
    if not isinstance(content, dict):
        raise ContractError(f"{what}: {path} is a {type(content).__name__}, needs a table of names and values")
    return content


def _fields(path: Path, content: dict[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict):
        raise ContractError(f"report: {name} in {path} is {value!r}, needs a table")
    return value


def _text(path: Path, content: dict[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise ContractError(f"report: {name} in {path} is {value!r}, needs a text")
    return value


def _count(path: Path, content: dict[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ContractError(f"report: {name} in {path} is {value!r}, needs a count of at least 1")
    return value


def _positive(path: Path, what: str, content: dict[str, Any], name: str) -> float:
    value = content.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ContractError(f"{what}: {name} in {path} is {value!r}, needs a number above 0")
    return float(value)
