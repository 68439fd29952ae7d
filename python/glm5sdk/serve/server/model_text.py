"""The text side of a served model: tokenizer, chat template, formats and sampling defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import CapacityError, CheckpointError
from glm5sdk.core.log import get_logger
from glm5sdk.text.chat import ChatTemplate
from glm5sdk.text.generation_config import GenerationConfig
from glm5sdk.text.output_format import detect_format
from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["DEFAULT_TEMPLATE", "ModelText"]

log = get_logger("serve")

DEFAULT_TEMPLATE = Path(__file__).with_name("default_chat_template.jinja")
_LONG = 4096  # characters that are tokenised in a thread: a hundred thousand take tens of milliseconds
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>")


class ModelText:
    """Turns requests into tokens.

    Args:
        tokenizer: of the checkpoint.
        template: for conversations.
        defaults: sampling values for what a request leaves open.
        tool_format: name of the format of reasoning and tool calls (see `text.output_format`); None reads it off the
            template.

    Raises:
        ContractError: there is no such format.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        defaults: GenerationConfig | None = None,
        tool_format: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults or GenerationConfig()
        self.most_tokens: int | None = None  # the longest prompt that the engine takes; the server sets it
        self.format = detect_format(template.source, name=tool_format)
        # Where a tokenizer marks the tags special, leaving special tokens out would hide what the parser needs.
        ids = {tokenizer.token_id(tag) for tag in _TAGS}
        self.tags_are_special = bool(ids & tokenizer.special_ids)

    @classmethod
    def from_pretrained(
        cls, path: str | PathLike[str], *, chat_template: Path | None = None, tool_format: str | None = None
    ) -> ModelText:
        """Read what a checkpoint folder says.

        Args:
            path: the folder.
            chat_template: a file that replaces the checkpoint's own template.
            tool_format: see the class.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        tokenizer = Tokenizer.from_pretrained(path)
        if chat_template is not None:
            template = _from_file(chat_template)
            log.info("chat template: %s", chat_template)
        elif has_template(Path(path)):
            template = ChatTemplate.from_pretrained(path)
            log.info("chat template: the checkpoint's own")
        else:
            template = _from_file(DEFAULT_TEMPLATE)
            log.warning("chat template: the checkpoint has none; the built-in one in GLM-5's form is used")
        defaults = GenerationConfig.from_pretrained(path)
        return cls(tokenizer, template, defaults=defaults, tool_format=tool_format)

    async def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to ids; a long text in a thread.

        Raises:
            ContractError: the text is no valid Unicode.
            CapacityError: the text has more than `most_tokens` tokens however it is cut; it was not tokenised, which
                holds up other threads.
        """
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if self.most_tokens is not None and len(text) > self.most_tokens * self.tokenizer.longest_token_bytes:
            raise CapacityError(
                f"prompt: length is {len(text)} characters, needs at most {self.most_tokens} tokens: this model's "
                f"maximum context length is {self.most_tokens} tokens"
            )
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text, rendered in the template's own process and awaited in a thread.

        Raises:
            ContractError, CapacityError: the template refuses the conversation, or it is too long.
        """
        return await asyncio.to_thread(
            self.template.render,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def token_text(self, token: int) -> str:
        """A token's own text; bytes that are no character alone become U+FFFD."""
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")


def has_template(folder: Path) -> bool:
    """Whether a checkpoint folder brings a chat template."""
    if (folder / "chat_template.jinja").exists():
        return True
    from glm5sdk.text.json_file import read_json_object

    return read_json_object(folder / "tokenizer_config.json").get("chat_template") is not None


def _from_file(file: Path) -> ChatTemplate:
    try:
        return ChatTemplate(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: chat template is unreadable ({error}), needs a jinja2 template") from error
