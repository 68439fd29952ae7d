"""One sequence's text taken apart: reasoning, content and tool calls, as it streams."""

from __future__ import annotations

from glm5sdk.serve.server.conversation import Prepared
from glm5sdk.serve.server.service import Service
from glm5sdk.text.output_events import Event, ParsedMessage, ToolCallStarted, message_of
from glm5sdk.text.output_parser import OutputParser

__all__ = ["AssistantText", "parsed"]


class AssistantText:
    """Feeds one sequence of an answer through the parser of the model's format.

    Args:
        service: whose model wrote the text.
        prepared: the prompt it answers.

    Attributes:
        called: whether a tool call has begun.
    """

    def __init__(self, service: Service, prepared: Prepared) -> None:
        # Without tools nothing is a call: what looks like one stays text.
        self._parser = OutputParser(service.text.format, prepared.tools or None, prepared.starts_in_reasoning)
        self.called = False

    def feed(self, text: str) -> list[Event]:
        """Events that more text completes."""
        return self._noted(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """Events of what still waits."""
        return self._noted(self._parser.finish())

    def _noted(self, events: list[Event]) -> list[Event]:
        self.called = self.called or any(isinstance(event, ToolCallStarted) for event in events)
        return events


def parsed(service: Service, prepared: Prepared, text: str) -> ParsedMessage:
    """A whole text taken apart."""
    parser = AssistantText(service, prepared)
    return message_of([*parser.feed(text), *parser.finish()])
