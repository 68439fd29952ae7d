"""A grammar of tool calls in GLM's format: how `tool_choice` "required" and a named tool are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["tool_grammar"]

_RAW = "raw"


def tool_grammar(tools: Sequence[Mapping[str, Any]], *, parallel: bool, newlines: bool = False) -> str:
    """A Lark grammar, as llguidance reads it, of one call or several of the given tools.

    String arguments are raw text up to their closing tag, others JSON by their schema. Arguments stand in the order of
    the schema; those not required may be left out.

    Args:
        tools: in OpenAI's nested form.
        parallel: whether a second call may follow.
        newlines: whether tags stand on lines of their own, as in the older form of the format.

    Returns:
        The grammar's text.
    """
    line = "\n" if newlines else ""
    more_calls = f" ({_quoted(line)} call)*" if newlines else "+"
    rules = [f"start: call{more_calls if parallel else ''}", f'{_RAW}[suffix="</arg_value>"]: /(?s:.*)/']
    calls = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        body, more = _arguments(function.get("parameters"), f"t{number}", line)
        rules += more
        calls.append(f"t{number}")
        rules.append(
            " ".join([f"t{number}: {_quoted('<tool_call>' + function['name'] + line)}", *body, '"</tool_call>"'])
        )
    rules.insert(1, f"call: {' | '.join(calls)}")
    return "\n".join(rules) + "\n"


def _arguments(schema: Any, prefix: str, line: str) -> tuple[list[str], list[str]]:
    """The names of a tool's argument rules in order, with ? where they may be absent, and the rules."""
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    body, rules = [], []
    for number, (key, entry) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
        name = f"{prefix}_a{number}"
        opening = _quoted(f"<arg_key>{key}</arg_key>{line}<arg_value>")
        rules.append(f"{name}: {opening} {_value(entry, schema)}" + (f" {_quoted(line)}" if line else ""))
        body.append(name if key in needed else f"{name}?")
    return body, rules


def _value(entry: Any, root: Mapping[str, Any]) -> str:
    entry = entry if isinstance(entry, Mapping) else {}
    choices = entry.get("enum", [entry["const"]] if "const" in entry else None)
    if isinstance(choices, list) and choices:
        spelled = [value if isinstance(value, str) else json.dumps(value) for value in choices]
        return f'({" | ".join(map(_quoted, spelled))}) "</arg_value>"'
    kinds = entry.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if (not kinds and "$ref" not in entry) or "string" in kinds:
        return _RAW  # raw text may spell any of the other types too
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f'%json {json.dumps({**shared, **entry})} "</arg_value>"'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
