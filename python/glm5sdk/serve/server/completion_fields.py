"""The bodies of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec

from glm5sdk.serve.server.chat_fields import ChatMessage, FunctionTool
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.model_text import ModelText
from glm5sdk.serve.server.sampling_fields import SamplingFields

__all__ = ["CompletionRequest", "DetokenizeRequest", "TokenizeRequest", "prompts_of"]

MAX_PROMPTS = 1024


class CompletionRequest(SamplingFields, kw_only=True):
    """The request; `prompt` is a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


async def prompts_of(body: CompletionRequest, text: ModelText) -> list[tuple[str | None, list[int]]]:
    """(text or None, token ids) of every prompt.

    Raises:
        ApiError: 400 the list mixes kinds, is empty or too long.
        ContractError: a text is no valid Unicode.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif not prompt:
        raise ApiError(400, "prompt: is empty, needs a text or token ids", param="prompt", code="empty_prompt")
    elif all(isinstance(entry, int) for entry in prompt):
        prompts = [[entry for entry in prompt if isinstance(entry, int)]]
    elif all(isinstance(entry, str) for entry in prompt):
        prompts = [entry for entry in prompt if isinstance(entry, str)]
    elif all(isinstance(entry, list) for entry in prompt):
        prompts = [entry for entry in prompt if isinstance(entry, list)]
    else:
        raise ApiError(400, "prompt: mixes texts, ids and lists, needs entries of one kind", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: holds {len(prompts)} prompts, needs at most {MAX_PROMPTS}", param="prompt")
    special = bool(body.add_special_tokens)
    return [
        (entry, await text.encode(entry, add_special_tokens=special)) if isinstance(entry, str) else (None, entry)
        for entry in prompts
    ]
