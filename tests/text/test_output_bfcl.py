"""Gold calls of the Berkeley Function Calling Leaderboard, written as GLM writes them, are read back unchanged.

Runs where the package `bfcl-eval` is installed, or GLM5SDK_BFCL names its data folder.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from glm5sdk.text.argument_types import ToolSchemas, json_type
from glm5sdk.text.output_events import message_of
from glm5sdk.text.output_parser import OutputParser
from glm5sdk.text.tool_calls import render_tool_call

# The leaderboard's words for types, where JSON Schema has another one.
TYPES = {"float": "number", "double": "number", "dict": "object", "HashMap": "object", "Hashtable": "object",
         "tuple": "array", "list": "array", "ArrayList": "array", "Array": "array", "Queue": "array", "Stack": "array",
         "String": "string", "char": "string", "bool": "boolean", "byte": "integer",
         "short": "integer", "long": "integer", "Bigint": "integer"}  # fmt: skip


def _folder() -> Path:
    if path := os.environ.get("GLM5SDK_BFCL"):
        return Path(path)
    found = importlib.util.find_spec("bfcl_eval")  # found, not imported: its modules need much that its data does not
    if found is None or not found.submodule_search_locations:
        pytest.skip("bfcl-eval is not installed, and GLM5SDK_BFCL names no folder")
    return Path(found.submodule_search_locations[0]) / "data"


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _schema(node):
    """The leaderboard's schema as JSON Schema."""
    if isinstance(node, list):
        return [_schema(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    schema = {key: _schema(value) for key, value in node.items()}
    if isinstance(node.get("type"), str):
        schema["type"] = TYPES.get(node["type"], node["type"])
    return schema


def _variants(call: dict) -> list[tuple[str, dict]]:
    """All calls that one entry of the gold answers stands for: each argument lists values; "" says: or left out."""
    ((name, options),) = call.items()
    result = []
    for k in range(max([len(values) for values in options.values()], default=1)):
        chosen = {key: values[min(k, len(values) - 1)] for key, values in options.items() if values}
        result.append((name, {key: v for key, v in chosen.items() if v != "" or len(options[key]) == 1}))
    return result


def _from_source(source: str, tools: list[dict]) -> tuple[str, dict]:
    """A call written in Python; arguments without a name are those of the schema, in its order."""
    call = ast.parse(source, mode="eval").body
    name = ast.unparse(call.func)
    names = next(list(tool["parameters"]["properties"]) for tool in tools if tool["name"] == name)
    arguments = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
    return name, arguments | {word.arg: ast.literal_eval(word.value) for word in call.keywords}


def _gold(folder: Path) -> dict[str, list[tuple[list[dict], list[tuple[str, dict]]]]]:
    """For each file its answers: the tools, and the calls of one answer."""
    docs = [tool for file in sorted((folder / "multi_turn_func_doc").glob("*.json")) for tool in _schema(_lines(file))]
    found: dict[str, list] = {}
    for file in sorted((folder / "possible_answer").glob("*.json")):
        questions = {entry["id"]: entry for entry in _lines(folder / file.name)}
        for entry in _lines(file):
            truth = entry["ground_truth"]
            if all(isinstance(call, dict) for call in truth):
                tools = _schema(questions[entry["id"]]["function"])
                variants = [_variants(call) for call in truth]
                answers = [[v[min(k, len(v) - 1)] for v in variants] for k in range(max(map(len, variants)))]
            elif all(isinstance(turn, list) for turn in truth):
                tools = docs
                answers = [[_from_source(source, tools) for source in turn] for turn in truth if turn]
            else:
                continue  # memory and web search ask for answers in words
            found.setdefault(file.stem, []).extend((tools, calls) for calls in answers)
    return found


def _read(text: str, tools: list[dict], draw: random.Random) -> list[tuple[str, dict]]:
    parser, events, at = OutputParser("glm47", tools, True), [], 0
    while at < len(text):
        size = draw.randint(1, 8)
        events += parser.feed(text[at : at + size])
        at += size
    message = message_of([*events, *parser.finish()])
    assert (message.reasoning, message.content) == ("Let me see.", "I call it.")
    assert all(call.complete for call in message.tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def _against_schema(schemas: ToolSchemas, name: str, arguments: dict) -> bool:
    """Whether a gold answer has a value that its own schema does not allow, or a string that reads as another type
    where the schema allows that type, too. The format has no words for either.
    """
    for key, value in arguments.items():
        types = schemas.types(name, key)
        if not json_type(value) & types:
            return True
        if isinstance(value, str) and types != {"string"}:
            try:
                json.loads(value)
            except ValueError:
                continue
            return True
    return False


@pytest.mark.full
def test_gold_calls_survive() -> None:
    draw = random.Random(0)
    counts: dict[str, list[int]] = {}
    failed = []
    for file, answers in _gold(_folder()).items():
        count = counts.setdefault(file, [0, 0, 0])
        for tools, calls in answers:
            text = "Let me see.</think>I call it." + "".join(render_tool_call(*call) for call in calls)
            got = _read(text, tools, draw)
            assert len(got) == len(calls)
            schemas = ToolSchemas(tools)
            for (name, arguments), read in zip(calls, got, strict=True):
                count[1] += 1
                wanted = json.loads(json.dumps(arguments))
                if read == (name, wanted) and json.dumps(read[1]) == json.dumps(wanted):
                    count[0] += 1
                elif _against_schema(schemas, name, arguments):
                    count[2] += 1
                else:
                    failed.append((file, name, wanted, read))
    print({file: f"{good}/{total}, {odd} against their schema" for file, (good, total, odd) in counts.items()})  # noqa: T201
    assert not failed
    assert counts and all(good + odd == total and odd <= total // 20 for good, total, odd in counts.values())
