"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["CountTokensRequest", "MessagesRequest"]


class InputMessage(msgspec.Struct, kw_only=True):
    """One message; `content` is a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether to call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """What the answer's text must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What a prompt is made of."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The request."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
