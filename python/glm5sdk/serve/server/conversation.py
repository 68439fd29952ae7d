"""A conversation in the form that chat templates read, whichever protocol it came in; and its prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5sdk.serve.params import StructuredOutput
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.service import Service
from glm5sdk.serve.server.tool_grammar import tool_grammar
from glm5sdk.text.call_parser import may_be_name
from glm5sdk.text.output_format import starts_in_reasoning

__all__ = ["Conversation", "Prepared", "arguments_of", "prepare", "text_of", "unsupported_part"]

_RESERVED = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})


@dataclass
class Conversation:
    """What a request says.

    Attributes:
        messages: dicts with `role`, `content` (a text) and what else templates read.
        tools: in OpenAI's nested form, `{"type": "function", "function": {...}}`.
        tool_choice: "auto", "none", "required", or `{"name": ...}` for exactly one call of one tool.
        variables: for the template.
        structured: what the answer's text must match.
        parallel: several calls in one answer are welcome.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | Mapping[str, str] = "auto"
    variables: dict[str, Any] = field(default_factory=dict)
    structured: StructuredOutput | None = None
    parallel: bool = True


@dataclass(frozen=True)
class Prepared:
    """A conversation ready for the engine.

    Attributes:
        prompt: its text.
        token_ids: its tokens.
        tools: those that the answer may call.
        starts_in_reasoning: the prompt ends inside the reasoning.
        structured: what the answer must match.
    """

    prompt: str
    token_ids: list[int]
    tools: list[dict[str, Any]]
    starts_in_reasoning: bool
    structured: StructuredOutput | None


async def prepare(service: Service, talk: Conversation) -> Prepared:
    """Render and tokenise a conversation.

    Raises:
        ApiError: 400 it is empty, or asks for a tool that it does not describe.
        ContractError, CapacityError: the template refuses it.
    """
    service.admission.check()
    if not talk.messages:
        raise ApiError(400, "messages: is empty, needs at least one message", param="messages")
    if bad := sorted(_RESERVED & talk.variables.keys()):
        raise ApiError(
            400, f"chat_template_kwargs: holds {bad[0]!r}, needs names that are not the request's own",
            param="chat_template_kwargs",
        )  # fmt: skip
    tools = [] if talk.tool_choice == "none" else talk.tools
    names = [tool["function"]["name"] for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ApiError(400, f"tools: {twice[0]!r} is described twice, needs names that differ", param="tools")
    if odd := [name for name in names if not may_be_name(name, (), whole=True)]:
        raise ApiError(
            400, f"tools: name is {odd[0]!r:.80}, needs a word without spaces, quotes and brackets", param="tools"
        )
    forced: list[dict[str, Any]] = []
    if isinstance(talk.tool_choice, Mapping):
        wanted = talk.tool_choice["name"]
        forced = [tool for tool in tools if tool["function"]["name"] == wanted]
        if not forced:
            raise ApiError(400, f"tool_choice: {wanted!r} is no tool, needs one of {names}", param="tool_choice")
    elif talk.tool_choice == "required":
        if not tools:
            raise ApiError(400, "tool_choice: is required without tools, needs tools", param="tool_choice")
        forced = tools
    if forced and talk.structured is not None:
        raise ApiError(
            400, "tool_choice: a forced call and a response format were given, needs one of them", param="tool_choice"
        )
    prompt = await service.text.render(talk.messages, tools or None, talk.variables)
    reasoning = starts_in_reasoning(prompt)
    structured = talk.structured
    if forced:
        form = service.text.format
        if not form.tags:
            raise ApiError(
                400, "tool_choice: a call was asked for, needs a model whose chat template has tool calls",
                param="tool_choice", code="unsupported_parameter",
            )  # fmt: skip
        several = talk.parallel and talk.tool_choice == "required"  # a tool asked for by name is called exactly once
        structured = StructuredOutput("grammar", tool_grammar(forced, parallel=several, newlines=form.newlines))
    if structured is not None and reasoning:
        structured = StructuredOutput(structured.kind, structured.value, after_reasoning=True)
    return Prepared(prompt, await service.text.encode(prompt), tools, reasoning, structured)


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, null, or a list of text parts.

    Raises:
        ApiError: 400 a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ApiError(400, f"{where}: is {type(content).__name__}, needs a text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported_part(kind, f"{where}[{index}]")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{where}[{index}]: text is missing, needs a text", param=f"{where}[{index}]")
        texts.append(text)
    return "".join(texts)


def unsupported_part(kind: Any, where: str) -> ApiError:
    """The refusal of a part that is not text."""
    shown = str(kind)[:40]
    media = any(word in shown for word in ("image", "audio", "video", "file", "document"))
    hint = ": this model reads text only" if media else ""
    return ApiError(
        400, f"{where}: part of type {shown!r} was given, needs text{hint}", param=where,
        code="unsupported_content" if media else "invalid_value",
    )  # fmt: skip


def arguments_of(text: str, where: str) -> dict[str, Any]:
    """A call's arguments, which travel as JSON text, as the object that templates walk through.

    Raises:
        ApiError: 400 they are no JSON object.
    """
    try:
        value = _decoded(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where}: is no JSON ({error}), needs a JSON object", param=where) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{where}: is a JSON {type(value).__name__}, needs an object", param=where)
    return value


def _decoded(text: str) -> Any:
    """JSON whose numbers may be of any size, as models write them; what no number here holds stays its text."""

    def integer(digits: str) -> int | str:
        return int(digits) if len(digits) < 300 else digits

    def fraction(digits: str) -> float | str:
        return float(digits) if math.isfinite(float(digits)) else digits

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    value = json.loads(text, parse_int=integer, parse_float=fraction, parse_constant=constant)
    if "\\ud" in text.lower():  # half of a character, spelled as an escape, is no text
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value
