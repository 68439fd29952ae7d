"""The inside of one `<tool_call>`: name, keys and values to events."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from glm5sdk.text.argument_json import ArgumentWriter, json_string
from glm5sdk.text.argument_types import ToolSchemas
from glm5sdk.text.output_events import Event, ToolCallArguments, ToolCallEnded, ToolCallStarted
from glm5sdk.text.tag_buffer import TagBuffer

__all__ = ["CALL", "CallParser", "Outcome", "may_be_name"]

CALL, _END_CALL = "<tool_call>", "</tool_call>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_LIMIT = 256
_NAME = re.compile(r"""\s*[^\s<>{}\[\]"'`]*\s*""")


class Outcome(Enum):
    """What a step came to."""

    ON = auto()  # go on
    WAIT = auto()  # not without more text
    NOT_A_CALL = auto()  # what follows `<tool_call>` is no name; nothing of it was taken
    ENDED = auto()  # the call is over
    NEXT = auto()  # the call is over, for another `<tool_call>` was read


class CallParser:
    """States of a call. `enter` when `<tool_call>` was read, then `step` until the outcome leaves the call.

    Args:
        buffer: the output's.
        schemas: of the request's tools.
        make_id: names a call.
        emit: takes the call's events.
        stray: takes text that belongs to no name, key or value.
    """

    def __init__(
        self,
        buffer: TagBuffer,
        schemas: ToolSchemas,
        make_id: Callable[[], str],
        emit: Callable[[Event], None],
        stray: Callable[[str], None],
    ) -> None:
        self._buffer, self._schemas, self._make_id = buffer, schemas, make_id
        self._emit, self._stray = emit, stray
        self._index = -1
        self._tool = self._key = ""
        self._count = 0
        self._waiting: list[str] = []
        self._writer = ArgumentWriter(frozenset())
        self.step: Callable[[], Outcome] = self._name

    def enter(self) -> None:
        """`<tool_call>` was read."""
        self.step = self._name

    def _name(self) -> Outcome:
        name, tag = self._buffer.before(_KEY, _END_CALL, limit=_NAME_LIMIT)
        if not may_be_name(name, self._schemas.names, whole=bool(tag)) or (self._buffer.final and not tag):
            return Outcome.NOT_A_CALL
        if not tag:
            return Outcome.WAIT
        self._buffer.skip(len(name))
        self._index += 1
        self._tool, self._count = name.strip(), 0
        self._emit(ToolCallStarted(self._index, self._tool, self._make_id()))
        self.step = self._between
        return Outcome.ON

    def _between(self) -> Outcome:
        """Before an argument, or the end."""
        gap, tag = self._collect(_KEY, _END_CALL, CALL)
        if not tag and not self._buffer.final:
            return Outcome.WAIT
        self._gap(gap)
        if tag.endswith(_KEY):
            self.step = self._in_key
            return Outcome.ON
        self._write("}" if self._count else "{}")
        self._emit(ToolCallEnded(self._index, complete=tag.endswith(_END_CALL)))
        return Outcome.NEXT if tag.endswith(CALL) else Outcome.ENDED

    def _in_key(self) -> Outcome:
        key, tag = self._collect(_END_KEY, _VALUE, _KEY, _END_CALL, CALL)
        if not tag and not self._buffer.final:
            return Outcome.WAIT
        if tag.endswith((_END_KEY, _VALUE)):
            self._key = key
            self.step = self._before_value
            return self._begin_value() if tag.endswith(_VALUE) else Outcome.ON
        return self._lost(_KEY + key, tag)

    def _before_value(self) -> Outcome:
        gap, tag = self._collect(_VALUE, _KEY, _END_CALL, CALL)
        if not tag and not self._buffer.final:
            return Outcome.WAIT
        if not tag.endswith(_VALUE):
            return self._lost(_KEY + self._key + _END_KEY + gap, tag)
        self._gap(gap)
        return self._begin_value()

    def _begin_value(self) -> Outcome:
        key = self._key
        if not self._schemas.has(self._tool, key):
            key = key.strip()
        self._write(("," if self._count else "{") + (" " if self._count else "") + json_string(key) + ": ")
        self._count += 1
        self._writer = ArgumentWriter(self._schemas.types(self._tool, key))
        self.step = self._in_value
        return Outcome.ON

    def _in_value(self) -> Outcome:
        text, tag = self._buffer.until(_END_VALUE)
        self._write(self._writer.push(text))
        if not tag and not self._buffer.final:
            return Outcome.WAIT
        self._write(self._writer.finish())
        self.step = self._between
        return Outcome.ON

    def _lost(self, text: str, tag: str) -> Outcome:
        """A key without a value: its text is kept, and the tag that came instead is read again."""
        self._stray(text)
        self._buffer.back(len(tag))
        self.step = self._between
        return Outcome.ON

    def _collect(self, *tags: str) -> tuple[str, str]:
        """Like the buffer's `until`, but keeps the text of earlier calls and gives it with the tag."""
        text, tag = self._buffer.until(*tags)
        self._waiting.append(text)
        if not tag and not self._buffer.final:
            return "", ""
        text, self._waiting = "".join(self._waiting), []
        return text, tag

    def _gap(self, text: str) -> None:
        if text.strip():
            self._stray(text)

    def _write(self, text: str) -> None:
        if text:
            self._emit(ToolCallArguments(self._index, text))


def may_be_name(text: str, tools: tuple[str, ...], *, whole: bool) -> bool:
    """Whether text is a tool's name with white space around it, or can still become one when it is not whole.

    A name is one of `tools`, or a word without quotes and brackets. Once this is false for the beginning of a text,
    it is false for the text.
    """
    if len(text) > _NAME_LIMIT:
        return False
    bare = text.strip()
    if whole:
        return bare in tools or bool(bare and _NAME.fullmatch(text))
    return _NAME.fullmatch(text) is not None or any(_continues(text.lstrip(), tool) for tool in tools)


def _continues(text: str, tool: str) -> bool:
    return tool.startswith(text) or text.rstrip() == tool
