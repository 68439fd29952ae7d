"""What a model's output is made of: events while it streams, a message at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

__all__ = [
    "ContentText",
    "Event",
    "ParsedMessage",
    "ReasoningText",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnded",
    "ToolCallStarted",
    "joined",
    "message_of",
]


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call whose name is whole.

    Attributes:
        index: 0 for the first call of the message.
        name: of the tool.
        id: under which the caller will send the tool's result.
    """

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. All texts of a call, joined, are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """A call has all its arguments.

    Attributes:
        index: of the call.
        complete: False when the call's closing tag never came: the output was cut, or the model forgot it. The
            arguments are a JSON object even then, but the last one may be cut; do not run such a call unasked.
    """

    index: int
    complete: bool = True


Event = ReasoningText | ContentText | ToolCallStarted | ToolCallArguments | ToolCallEnded


@dataclass
class ToolCall:
    """One whole call.

    Attributes:
        name: of the tool.
        arguments: a JSON object, as text.
        id: under which the caller will send the tool's result.
        complete: see `ToolCallEnded`.
    """

    name: str
    arguments: str = ""
    id: str = ""
    complete: bool = False


@dataclass
class ParsedMessage:
    """A whole output: its reasoning, its content and its calls, each in the order of the text."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with texts that follow each other made one."""
    result: list[Event] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", 0))):
        run = list(group)
        first = run[0]
        if isinstance(first, (ReasoningText, ContentText, ToolCallArguments)):
            run = [replace(first, text="".join(event.text for event in run if isinstance(event, type(first))))]
        result += run
    return result


def message_of(events: Iterable[Event]) -> ParsedMessage:
    """Put all events of one output together."""
    message = ParsedMessage()
    for event in joined(events):
        match event:
            case ReasoningText(text):
                message.reasoning += text
            case ContentText(text):
                message.content += text
            case ToolCallStarted(_, name, id):
                message.tool_calls.append(ToolCall(name, id=id))
            case ToolCallArguments(index, text):
                message.tool_calls[index].arguments += text
            case ToolCallEnded(index, complete):
                message.tool_calls[index].complete = complete
    return message
