"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from glm5sdk.serve.server.sampling_fields import SamplingFields

__all__ = ["ChatMessage", "ChatRequest", "FunctionTool", "NamedToolChoice"]


class CalledFunction(msgspec.Struct, kw_only=True):
    """What an assistant called."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(msgspec.Struct, kw_only=True):
    """One call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class FunctionDescription(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDescription


class NamedFunction(msgspec.Struct, kw_only=True):
    """Whose name is wanted."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """`tool_choice` for one tool."""

    type: Literal["function"]
    function: NamedFunction


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """`thinking`, as GLM's own API has it."""

    type: Literal["enabled", "disabled"]


class ChatRequest(SamplingFields, kw_only=True):
    """The request."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: ThinkingSwitch | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: list[Any] | None = None
