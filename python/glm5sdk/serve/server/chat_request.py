"""From OpenAI's chat messages to a conversation."""

from __future__ import annotations

from typing import Any

import msgspec

from glm5sdk.serve.server.chat_fields import ChatMessage, ChatRequest, NamedToolChoice
from glm5sdk.serve.server.conversation import Conversation, arguments_of, text_of, unsupported_part
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.sampling_fields import structured_output

__all__ = ["conversation_of", "effort_variables"]

_UNSUPPORTED = {
    "audio": "this model writes text only",
    "functions": "use tools instead",
    "function_call": "use tool_choice instead",
    "web_search_options": "this server searches nothing",
    "chat_template": "the server's own is used; chat_template_kwargs sets its variables",
    "documents": "put their text into a message",
    "continue_final_message": "send the beginning of the answer to /v1/completions instead",
    "echo": "the prompt of a chat is not repeated",
}


def conversation_of(body: ChatRequest) -> Conversation:
    """What the request says.

    Raises:
        ApiError: 400 it holds what is not supported, or does not fit together.
    """
    for name, hint in _UNSUPPORTED.items():
        if getattr(body, name):
            raise ApiError(
                400, f"{name}: is given, needs to be absent: {hint}", param=name, code="unsupported_parameter"
            )
    if body.add_generation_prompt is False:
        raise ApiError(
            400, "add_generation_prompt: is false, needs true: an assistant's turn is what is generated",
            param="add_generation_prompt", code="unsupported_parameter",
        )  # fmt: skip
    if other := [kind for kind in body.modalities or [] if kind != "text"]:
        raise ApiError(
            400, f"modalities: holds {other[0][:40]!r}, needs text alone", param="modalities",
            code="unsupported_content",
        )  # fmt: skip
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, NamedToolChoice):
        choice = {"name": choice.function.name}
    return Conversation(
        messages=[_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)],
        tools=[{"type": "function", "function": msgspec.to_builtins(tool.function)} for tool in body.tools or []],
        tool_choice=choice,
        variables={**_thinking(body), **effort_variables(body.reasoning_effort), **(body.chat_template_kwargs or {})},
        structured=structured_output(body),
        parallel=body.parallel_tool_calls is not False,
    )


def effort_variables(effort: str | None) -> dict[str, Any]:
    """The template's variables for `reasoning_effort`."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _thinking(body: ChatRequest) -> dict[str, Any]:
    return {} if body.thinking is None else {"enable_thinking": body.thinking.type == "enabled"}


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.audio is not None:
        raise unsupported_part("audio", f"{where}.audio")
    if message.function_call is not None:
        raise ApiError(
            400, f"{where}.function_call: is given, needs tool_calls instead", param=f"{where}.function_call"
        )
    role = "system" if message.role == "developer" else message.role
    if role != "assistant" and message.content is None:
        raise ApiError(400, f"{where}.content: is missing, needs a text", param=f"{where}.content")
    plain: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{where}.content")}
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            plain["reasoning_content"] = reasoning
        if message.refusal and not plain["content"]:
            plain["content"] = message.refusal
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments
                        if isinstance(call.function.arguments, dict)
                        else arguments_of(call.function.arguments, f"{where}.tool_calls[{index}].function.arguments"),
                    },
                }
                for index, call in enumerate(message.tool_calls)
            ]
    if role == "tool" and message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain
