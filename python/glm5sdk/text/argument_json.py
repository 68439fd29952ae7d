"""One argument's raw text to JSON, piece by piece, by the types that its schema allows."""

from __future__ import annotations

import json
import re
from typing import Any

from glm5sdk.text.argument_types import json_type

__all__ = ["ArgumentWriter", "json_string"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITE = " \t\r\n"  # JSON's
_NUMBER_PART = re.compile(r"[-+.eE0-9 \t\r\n]*")
_LITERALS = {"t": ("true", "boolean"), "f": ("false", "boolean"), "n": ("null", "null")}
_HEAD = 8  # longer than any literal
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ArgumentWriter:
    """Writes the JSON of one argument while its raw text arrives.

    Only strings may be allowed: then text comes out as it comes in, escaped. Strings may be among what is allowed: then
    the argument is JSON if it is JSON of another allowed type, and else a string; it streams from the character on at
    which it can be nothing but a string. No string is allowed: the text waits until it is whole; JSON passes unchanged
    but for the white space around it, Python's True, False and None become JSON's, and whatever else is a string.

    Args:
        types: names of JSON Schema types, see `ToolSchemas.types`.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._text_only = types == {"string"}  # no way back from here: the opening quote is out
        self._opened = False
        self._waiting: list[str] = []
        self._head = ""

    def push(self, piece: str) -> str:
        """Take more of the text; return more of the JSON."""
        if self._text_only:
            return self._open() + _escaped(piece)
        self._waiting.append(piece)
        if "string" in self._types and not self._may_be_other(piece):
            self._text_only = True
            waiting, self._waiting = "".join(self._waiting), []
            return self._open() + _escaped(waiting)
        return ""

    def finish(self) -> str:
        """The text is whole; return the rest of the JSON."""
        if self._text_only:
            return self._open() + '"'
        return self._whole("".join(self._waiting))

    def _open(self) -> str:
        opened, self._opened = self._opened, True
        return "" if opened else '"'

    def _may_be_other(self, piece: str) -> bool:
        """Whether the text, of which `piece` is new, may still become JSON of an allowed type other than string."""
        if not self._head:
            piece = piece.lstrip(_WHITE)
        room = _HEAD - len(self._head)
        self._head += piece[:room]
        first = self._head[:1]
        if not first:
            return True
        if first in "{[":
            return ("object" if first == "{" else "array") in self._types
        if first in _LITERALS:
            # Nothing but white space may follow the word, however much of it there is.
            word, kind = _LITERALS[first]
            return kind in self._types and word.startswith(self._head.rstrip(_WHITE)) and not piece[room:].strip(_WHITE)
        if first not in "-0123456789" or not self._types & {"integer", "number"}:
            return False
        return _NUMBER_PART.fullmatch(piece) is not None

    def _whole(self, text: str) -> str:
        bare = text.strip(_WHITE)
        try:
            value = json.loads(bare, parse_constant=_no_constant, parse_int=_integer)
        except (ValueError, RecursionError):
            word = _PYTHON_WORDS.get(bare)
            if word is not None and json_type(json.loads(word)) & self._types and "string" not in self._types:
                return word
            return json_string(text)
        if "string" in self._types and (isinstance(value, str) or not json_type(value) & self._types):
            return json_string(text)
        return _SURROGATE.sub(_code, bare)


def json_string(text: str) -> str:
    """Text as a JSON string; a lone surrogate, which no UTF-8 can spell, becomes an escape."""
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """Escapes character by character, so that escaped pieces join to the escaped whole."""
    return _SURROGATE.sub(_code, json.dumps(text, ensure_ascii=False)[1:-1])


def _code(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _integer(digits: str) -> int:
    return 1  # the type is all that is asked for, and Python limits how many digits it converts
