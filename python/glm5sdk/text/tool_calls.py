"""Write a tool call as GLM models write it: the inverse of the output parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glm5sdk.core.errors import ContractError
from glm5sdk.text.call_parser import may_be_name
from glm5sdk.text.output_format import OutputFormat, find_format

__all__ = ["render_tool_call"]


def render_tool_call(name: str, arguments: Mapping[str, Any] | str, format: OutputFormat | str = "glm47") -> str:
    """One call. Strings stand as they are, other values as JSON.

    Args:
        name: of the tool.
        arguments: by name; or a JSON object as text.
        format: how the model marks up, or its name.

    Returns:
        The call. The parser gives the same name and arguments back, if it knows the tool's schema, and no string is
        given where the schema wants something else.

    Raises:
        ContractError: the format has no calls, the name is none, the arguments are no JSON object, or a text holds the
            tag that would end it.
    """
    form = find_format(format) if isinstance(format, str) else format
    if not form.tags:
        raise ContractError(f"tool call: format is {form.name!r}, needs one that has calls")
    if name != name.strip() or not may_be_name(name, (), whole=True):
        raise ContractError(f"tool call: name is {name!r:.80}, needs a word without spaces, quotes and brackets")
    line = "\n" if form.newlines else ""
    parts = [f"<tool_call>{name}{line}"]
    for key, value in _object(arguments).items():
        text = value if isinstance(value, str) else _json(key, value)
        _without("key", key, ("</arg_key>", "<arg_value>", "<arg_key>", "<tool_call>", "</tool_call>"))
        _without(f"argument {key!r:.80}", text, ("</arg_value>",))
        parts.append(f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}")
    return "".join([*parts, "</tool_call>"])


def _object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"tool call: arguments are no JSON ({error}), needs a JSON object") from error
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ContractError(f"tool call: arguments are {value!r:.80}, needs a JSON object")
    return value


def _json(key: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(f"tool call: argument {key!r:.80} is no JSON ({error}), needs a JSON value") from error


def _without(what: str, text: str, tags: tuple[str, ...]) -> None:
    for tag in tags:
        if tag in text:
            raise ContractError(f"tool call: {what} holds {tag}, needs a text without it: the format has no escape")
