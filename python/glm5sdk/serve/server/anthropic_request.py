"""From Anthropic's messages to a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5sdk.serve.params import StructuredOutput
from glm5sdk.serve.server.anthropic_fields import CountTokensRequest, Tool
from glm5sdk.serve.server.chat_request import effort_variables
from glm5sdk.serve.server.conversation import Conversation, text_of, unsupported_part
from glm5sdk.serve.server.errors import ApiError

__all__ = ["conversation_of"]


def conversation_of(body: CountTokensRequest) -> Conversation:
    """What the request says.

    Raises:
        ApiError: 400 it holds what is not supported, or does not fit together.
    """
    if body.mcp_servers:
        raise ApiError(400, "mcp_servers: is given, needs to be absent: this server calls nobody", param="mcp_servers")
    messages: list[dict[str, Any]] = []
    if system := text_of(body.system, "system"):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        if message.role == "assistant":
            messages.append(_assistant(message.content, where))
        elif message.role == "system":
            messages.append({"role": "system", "content": text_of(message.content, where)})
        else:
            messages += _user(message.content, where)
    if body.messages and body.messages[-1].role == "assistant":
        raise ApiError(
            400, "messages: the last one is the assistant's, needs the user's: answers cannot be begun for the model",
            param="messages",
        )  # fmt: skip
    variables: dict[str, Any] = {"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"}
    config = body.output_config
    if config is not None and config.effort is not None:
        variables |= effort_variables(config.effort)
    form = (config.format if config is not None else None) or body.output_format
    choice, parallel = _choice(body)
    return Conversation(
        messages=messages,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])],
        tool_choice=choice,
        variables={**variables, **(body.chat_template_kwargs or {})},
        structured=None if form is None else StructuredOutput("json_schema", form.schema),
        parallel=parallel,
    )


def _choice(body: CountTokensRequest) -> tuple[str | Mapping[str, str], bool]:
    choice = body.tool_choice
    if choice is None:
        return "auto", True
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: is missing, needs a tool's name", param="tool_choice")
        return {"name": choice.name}, parallel
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type], parallel


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.input_schema is None:
        kind = f" of type {tool.type[:40]!r}" if tool.type else ""
        raise ApiError(
            400, f"{where}: {tool.name[:40]!r}{kind} has no input_schema, needs a tool that the client runs",
            param=where, code="unsupported_tool",
        )  # fmt: skip
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _assistant(content: str | list[dict[str, Any]], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        spot = f"{where}[{index}]"
        match block.get("type"):
            case "text":
                texts.append(_field(block, "text", str, spot))
            case "thinking":
                thoughts.append(_field(block, "thinking", str, spot))
            case "redacted_thinking":
                pass  # nobody here can read it
            case "tool_use":
                function = {
                    "name": _field(block, "name", str, spot), "arguments": _field(block, "input", dict, spot),
                }  # fmt: skip
                calls.append({"id": _field(block, "id", str, spot), "type": "function", "function": function})
            case kind:
                raise unsupported_part(kind, spot)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(content: str | list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """A user's message: results of tools and texts, in their order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        spot = f"{where}[{index}]"
        match block.get("type"):
            case "text":
                text = _field(block, "text", str, spot)
                if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += text
                else:
                    messages.append({"role": "user", "content": text})
            case "tool_result":
                name = _field(block, "tool_use_id", str, spot)
                text = text_of(block.get("content"), f"{spot}.content")
                messages.append({"role": "tool", "tool_call_id": name, "content": text})
            case kind:
                raise unsupported_part(kind, spot)
    if not messages:
        raise ApiError(400, f"{where}: is empty, needs a text or blocks", param=where)
    return messages


def _field(block: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        want = {"str": "a text", "dict": "an object"}[kind.__name__]
        raise ApiError(400, f"{where}.{name}: is missing or of the wrong type, needs {want}", param=f"{where}.{name}")
    return value
