"""OutputParser: reasoning, content and tool calls out of a GLM model's text, while it streams."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5sdk.core.errors import ContractError
from glm5sdk.text.argument_types import ToolSchemas
from glm5sdk.text.call_parser import CALL, CallParser, Outcome
from glm5sdk.text.output_events import ContentText, Event, ParsedMessage, ReasoningText, joined, message_of
from glm5sdk.text.output_format import OutputFormat, find_format
from glm5sdk.text.tag_buffer import TagBuffer

__all__ = ["OutputParser", "new_call_id", "parse_output"]

_THINK, _END_THINK = "<think>", "</think>"


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """One machine for reasoning and tool calls. However a text is cut into pieces, its events are the same, but for
    where texts that follow each other are cut.

    What it makes of texts that are not as they should be; none of them loses a character that is no tag:

    - Reasoning ends at `</think>`, or at a tool call. A second `<think>` at its start, and a `</think>` at the start of
      the content, are dropped; anywhere else they are text.
    - `<tool_call>` begins a call if a name and then `<arg_key>` or `</tool_call>` follow; else it is text. A name is a
      word without quotes or brackets of at most 256 characters, or a tool's name.
    - A value ends at `</arg_value>` and nowhere else. Text between the tags of a call is content, an `<arg_key>` whose
      value never comes is, too; the call goes on.
    - A call ends at `</tool_call>`, at the next `<tool_call>`, and with the output. Its arguments are a JSON object in
      any case; a key that comes twice is in it twice, and readers take the last.
    - White space alone before, between and after calls is dropped.

    Args:
        format: how the model marks up; the name of a format will do.
        tools: the request's tools, see `ToolSchemas`. None: calls are not looked for, their text is content. Empty:
            they are, and any argument may have any type.
        starts_in_reasoning: whether the prompt ended inside the reasoning (`output_format.starts_in_reasoning` tells);
            None: as the format always does.
        make_id: names a call.

    Raises:
        ContractError: the format is unknown, or a tool is no dict with a name.
    """

    def __init__(
        self,
        format: OutputFormat | str = "glm47",
        tools: Sequence[Mapping[str, Any]] | None = None,
        starts_in_reasoning: bool | None = None,
        *,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        form = find_format(format) if isinstance(format, str) else format
        reasons = form.always_reasons if starts_in_reasoning is None else starts_in_reasoning
        self._newlines = form.newlines
        self._calls = tools is not None and form.tags
        self._buffer = TagBuffer()
        self._events: list[Event] = []
        self._call = CallParser(self._buffer, ToolSchemas(tools or ()), make_id, self._events.append, self._content)
        self._step: Callable[[], bool] = self._plain
        if form.tags:
            self._step = self._reasoning_start if reasons else self._content_start
        self._say: Callable[[str], None] = self._content  # where a `<tool_call>` that is none belongs
        self._back: Callable[[], bool] = self._in_content
        self._opening = ""
        self._space: list[str] = []
        self._reasoned = reasons
        self._after_call = False

    def feed(self, text: str) -> list[Event]:
        """Take more text; return what it made certain.

        Raises:
            ContractError: the output was finished.
        """
        if self._buffer.final:
            raise ContractError("output parser: the output is finished, needs a new parser for another one")
        self._buffer.push(text)
        return self._run()

    def finish(self) -> list[Event]:
        """The output is over; return the rest. Tags begun and not ended are text, an open call is ended."""
        if self._buffer.final:
            return []
        self._buffer.final = True
        return self._run()

    def _run(self) -> list[Event]:
        while self._step():
            pass
        events = joined(self._events)
        self._events.clear()  # the list itself belongs to the call parser, too
        return events

    # Each state does what it can and says whether to go on; False waits for more text.

    def _plain(self) -> bool:
        self._content(self._buffer.rest())
        return False

    def _reasoning_start(self) -> bool:
        """The prompt has written `<think>`; some models write it again."""
        begins = self._buffer.begins(_THINK)
        if begins is None:
            return False
        self._buffer.skip(len(_THINK) if begins else 0)
        return self._after_newline(self._in_reasoning)

    def _in_reasoning(self) -> bool:
        self._reasoned = True
        text, tag = self._buffer.until(_END_THINK, *([CALL] if self._calls else []), newline=self._newlines)
        self._reasoning(text)
        if not tag:
            return False
        if tag.endswith(CALL):
            self._say, self._back = self._reasoning, self._in_reasoning
            return self._enter_call(tag)
        return self._after_newline(self._content_start)

    def _content_start(self) -> bool:
        """Nothing but white space has come yet; it is content if content follows."""
        self._space.append(self._buffer.space())
        for tag in self._tags_at_start():
            begins = self._buffer.begins(tag)
            if begins is None:
                return False
            if begins:
                self._buffer.skip(len(tag))
                return self._tag_at_start(tag)
        if not self._buffer.empty or (self._buffer.final and not self._after_call):
            self._content(self._spaces())
            self._step = self._in_content
            return True
        return False

    def _tags_at_start(self) -> list[str]:
        think = [] if self._after_call else [_END_THINK] if self._reasoned else [_END_THINK, _THINK]
        return think + ([CALL] if self._calls else [])

    def _tag_at_start(self, tag: str) -> bool:
        if tag == _END_THINK:
            return self._after_newline(self._content_start)
        space = self._spaces()
        if tag == _THINK:
            return self._after_newline(self._in_reasoning)
        self._say, self._back = self._content, self._in_content
        return self._enter_call(space + tag)

    def _in_content(self) -> bool:
        if not self._calls:
            return self._plain()
        text, tag = self._buffer.until(CALL, newline=self._newlines)
        self._content(text)
        if not tag:
            return False
        self._say, self._back = self._content, self._in_content
        return self._enter_call(tag)

    def _enter_call(self, opening: str) -> bool:
        """`opening` is `<tool_call>` and the white space before it: text, if no call follows."""
        self._opening = opening
        self._call.enter()
        self._step = self._in_call
        return True

    def _in_call(self) -> bool:
        outcome = self._call.step()
        if outcome is Outcome.NOT_A_CALL:
            self._say(self._opening)
            self._step = self._back
        elif outcome is Outcome.ENDED:
            self._after_call = True
            self._step = self._content_start
        elif outcome is Outcome.NEXT:
            self._after_call = True
            self._say, self._back = self._content, self._in_content
            return self._enter_call(CALL)
        return outcome is not Outcome.WAIT

    def _after_newline(self, state: Callable[[], bool]) -> bool:
        """Go to a state, past the newline that ends a tag's line in the older format."""
        if not self._newlines:
            self._step = state
            return True

        def past_newline() -> bool:
            begins = self._buffer.begins("\n")
            if begins is None:
                return False
            self._buffer.skip(1 if begins else 0)
            self._step = state
            return True

        self._step = past_newline
        return True

    def _spaces(self) -> str:
        text, self._space = "".join(self._space), []
        return text

    def _content(self, text: str) -> None:
        if text:
            self._events.append(ContentText(text))

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningText(text))


def parse_output(
    text: str,
    format: OutputFormat | str = "glm47",
    tools: Sequence[Mapping[str, Any]] | None = None,
    starts_in_reasoning: bool | None = None,
    *,
    make_id: Callable[[], str] = new_call_id,
) -> ParsedMessage:
    """A whole output at once; arguments and errors as of `OutputParser`."""
    parser = OutputParser(format, tools, starts_in_reasoning, make_id=make_id)
    return message_of([*parser.feed(text), *parser.finish()])
