"""From the Responses API's items to a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5sdk.serve.params import StructuredOutput
from glm5sdk.serve.server.chat_request import effort_variables
from glm5sdk.serve.server.conversation import Conversation, arguments_of, text_of
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.responses_fields import ResponsesRequest, ResponsesTool, ResponsesToolChoice

__all__ = ["conversation_of", "messages_of"]

_UNSUPPORTED = {
    "background": "answers are made while the client waits",
    "conversation": "use previous_response_id",
    "prompt": "this server keeps no prompts",
    "top_logprobs": "ask /v1/chat/completions for log-probabilities",
}


def conversation_of(body: ResponsesRequest, messages: list[dict[str, Any]]) -> Conversation:
    """What the request says.

    Args:
        body: the request.
        messages: those of the previous response and those of `messages_of`.

    Raises:
        ApiError: 400 it holds what is not supported, or does not fit together.
    """
    for name, hint in _UNSUPPORTED.items():
        if getattr(body, name):
            raise ApiError(
                400, f"{name}: is given, needs to be absent: {hint}", param=name, code="unsupported_parameter"
            )
    if "message.output_text.logprobs" in (body.include or []):
        raise ApiError(400, f"include: asks for logprobs, needs to be without: {_UNSUPPORTED['top_logprobs']}",
                       param="include", code="unsupported_parameter")  # fmt: skip
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, ResponsesToolChoice):
        if choice.type != "function" or not choice.name:
            raise ApiError(
                400, f"tool_choice: type is {choice.type[:40]!r}, needs function with a name", param="tool_choice"
            )
        choice = {"name": choice.name}
    effort = effort_variables(body.reasoning.effort if body.reasoning else None)
    return Conversation(
        messages=[*system, *messages],
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])],
        tool_choice=choice,
        variables={**effort, **(body.chat_template_kwargs or {})},
        structured=_structured(body),
        parallel=body.parallel_tool_calls is not False,
    )


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as messages; what an assistant thought, said and called in a row becomes one message.

    Raises:
        ApiError: 400 an item is malformed or of a kind that is not supported.
    """
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(body.input):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise ApiError(400, f"{where}.role: is {role!r:.40}, needs user, assistant, system or developer",
                               param=f"{where}.role")  # fmt: skip
            text = text_of(item.get("content"), f"{where}.content")
            if role == "assistant":
                _assistant(messages, fresh=("content", "tool_calls"))["content"] = text
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": text})
        case "reasoning":
            thoughts = _reasoning(item, where)
            if thoughts:
                _assistant(messages, fresh=("reasoning_content", "content", "tool_calls"))["reasoning_content"] = (
                    thoughts
                )
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {
                    "name": _text(item, "name", where),
                    "arguments": arguments_of(_text(item, "arguments", where), f"{where}.arguments"),
                },
            }
            _assistant(messages, fresh=()).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": text})
        case kind:
            raise ApiError(
                400, f"{where}.type: is {kind!r:.40}, needs message, reasoning, function_call or function_call_output",
                param=f"{where}.type", code="unsupported_content",
            )  # fmt: skip


def _assistant(messages: list[dict[str, Any]], fresh: Sequence[str]) -> dict[str, Any]:
    """The assistant's message that goes on; a new one when the last has any of the `fresh` fields already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(field) for field in fresh):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    texts = []
    for field in ("content", "summary"):  # the summary stands in where a client kept nothing else
        parts = item.get(field) or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise ApiError(400, f"{where}.{field}: is malformed, needs a list of parts", param=f"{where}.{field}")
        texts.append("".join(part["text"] for part in parts if isinstance(part.get("text"), str)))
    return texts[0] or texts[1]


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name}: is missing, needs a text", param=f"{where}.{name}")
    return value


def _tool(tool: ResponsesTool, where: str) -> dict[str, Any]:
    if tool.type != "function" or not tool.name:
        raise ApiError(
            400, f"{where}: type is {tool.type[:40]!r}, needs function with a name: this server runs no tools itself",
            param=where, code="unsupported_tool",
        )  # fmt: skip
    function: dict[str, Any] = {"name": tool.name}
    for name in ("description", "parameters"):
        if getattr(tool, name) is not None:
            function[name] = getattr(tool, name)
    return {"type": "function", "function": function}


def _structured(body: ResponsesRequest) -> StructuredOutput | None:
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutput("json_object")
    if form.schema is None:
        raise ApiError(400, "text.format: schema is missing, needs a JSON schema", param="text.format")
    return StructuredOutput("json_schema", form.schema)
