"""A checkpoint's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.text.chat_process import TemplateLimits, TemplateProcess
from glm5sdk.text.json_file import read_json_object

__all__ = ["ChatTemplate", "TemplateLimits"]

# Names under which clients send an assistant's reasoning; templates read the first, some read the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A jinja2 chat template, rendered as Hugging Face renders it, in a bounded process (see `TemplateProcess`).

    Args:
        source: the template.
        special_tokens: variables that every rendering sees, for example `{"eos_token": "<|endoftext|>"}`.
        limits: what one rendering may use.

    Raises:
        CheckpointError: the template does not parse.
        CapacityError: the template is too long, or takes too long to parse.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._process = TemplateProcess(source, limits or TemplateLimits())

    @classmethod
    def from_pretrained(
        cls, path: str | PathLike[str], *, name: str = "default", limits: TemplateLimits | None = None
    ) -> ChatTemplate:
        """Load `chat_template.jinja`, or the `chat_template` of `tokenizer_config.json`, from a checkpoint folder.

        Args:
            path: the folder.
            name: which template, where the checkpoint has several.
            limits: what one rendering may use.

        Raises:
            CheckpointError: there is no such template, or it does not parse; the message names the files.
        """
        folder = Path(path)
        settings = read_json_object(folder / "tokenizer_config.json")
        templates = _templates(folder, settings)
        if name not in templates:
            found = ", ".join(sorted(templates)) or "none"
            raise CheckpointError(
                f"{folder}: chat templates are {found}, needs {name!r} in chat_template.jinja or tokenizer_config.json"
            )
        try:
            return cls(templates[name], special_tokens=_special_tokens(settings), limits=limits)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Messages to text.

        Args:
            messages: dicts of JSON values: `role` and what else the template reads (`content`, `tool_calls`, ...).
            tools: JSON schemas of the tools the model may call.
            documents: dicts for retrieval templates.
            add_generation_prompt: end with the opening of the assistant's turn.
            **variables: what else the template reads (GLM-5: `enable_thinking`, `clear_thinking`, `reasoning_effort`).

        Returns:
            The rendered text, special tokens spelled out; encode it without adding more.

        Raises:
            ContractError: a message is no dict, a value is no JSON, or the template refuses the conversation.
            CheckpointError: the template reaches for what the sandbox forbids.
            CapacityError: the template ran into a limit.
        """
        if isinstance(messages, (str, bytes, Mapping)):
            raise ContractError(f"chat template: messages is {type(messages).__name__}, needs a list of dicts")
        conversation = []
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise ContractError(f"chat template: messages[{index}] is {type(message).__name__}, needs a dict")
            conversation.append(_prepared(message))
        return self._process.render(
            {
                **self._special_tokens,
                **variables,
                "messages": conversation,
                "tools": None if tools is None else list(tools),
                "documents": None if documents is None else list(documents),
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def close(self) -> None:
        """End the template's process; rendering again starts it again."""
        self._process.close()


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """What clients send and templates trip over: null fields go, reasoning gets the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}  # else "None" may be printed
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """All templates of a checkpoint by name; files win over the tokenizer's config."""
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        stored = [{"name": "default", "template": stored}]
    if not isinstance(stored, (list, type(None))):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {stored!r:.80}, needs a text or a list of templates"
        )
    templates: dict[str, str] = {}
    for entry in stored or []:
        if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: chat_template has entry {entry!r}, needs a name and a template"
            )
        templates[entry["name"]] = entry["template"]
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.exists():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: file is unreadable ({error}), needs a template in UTF-8") from error
    return templates


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like; stored as a string or as an added token's fields."""
    found = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
