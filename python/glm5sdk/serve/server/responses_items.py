"""Output items of the Responses API: built from parser events, with the API's own events on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from glm5sdk.serve.server.service import new_id
from glm5sdk.text.output_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallStarted

__all__ = ["OutputItems"]

Payload = dict[str, Any]


class OutputItems:
    """Grows one item after the other.

    Attributes:
        items: all so far; the last one may still grow.
    """

    def __init__(self) -> None:
        self.items: list[Payload] = []
        self._open = False

    def payloads(self, events: Iterable[Event]) -> Iterator[Payload]:
        """Take parser events; give the API's."""
        for said in events:
            match said:
                case ReasoningText(text):
                    yield from self._grow("reasoning", text)
                case ContentText(text):
                    yield from self._grow("message", text)
                case ToolCallStarted(_, name, call):
                    yield from self.end()
                    fresh = {"id": new_id("fc_"), "call_id": call, "name": name, "arguments": ""}
                    yield from self._begin("function_call", fresh)
                case ToolCallArguments(_, text):
                    self.items[-1]["arguments"] += text
                    yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}

    def end(self, status: str = "completed") -> Iterator[Payload]:
        """Close the item that is open."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield {
                "type": "response.function_call_arguments.done", **self._place(), "name": item["name"],
                "arguments": item["arguments"],
            }  # fmt: skip
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            done = {"type": f"response.{kind}.done", **self._place(), "content_index": 0, "text": part["text"]}
            yield {**done, "logprobs": []} if kind == "output_text" else done
            yield {"type": "response.content_part.done", **self._place(), "content_index": 0, "part": dict(part)}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def message(self) -> Payload:
        """The items as a message for the next turn's template: reasoning, text and calls."""
        said: Payload = {"role": "assistant", "content": ""}
        for item in self.items:
            if item["type"] == "message":
                said["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                said["reasoning_content"] = said.get("reasoning_content", "") + item["content"][0]["text"]
        return said

    def _grow(self, kind: str, text: str) -> Iterator[Payload]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self.end()
            if kind == "message":
                part: Payload = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                fresh: Payload = {"id": new_id("msg_"), "role": "assistant", "content": []}
            else:
                part = {"type": "reasoning_text", "text": ""}
                fresh = {"id": new_id("rs_"), "summary": [], "content": []}
            yield from self._begin(kind, fresh)
            self.items[-1]["content"].append(part)
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": dict(part)}
        self.items[-1]["content"][0]["text"] += text
        delta = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            yield {"type": "response.output_text.delta", **delta, "logprobs": []}
        else:
            yield {"type": "response.reasoning_text.delta", **delta}

    def _begin(self, kind: str, fresh: Payload) -> Iterator[Payload]:
        item = {"type": kind, "status": "in_progress", **fresh}
        self.items.append(item)
        self._open = True
        shown = {key: list(value) if isinstance(value, list) else value for key, value in item.items()}
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _place(self) -> Payload:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
