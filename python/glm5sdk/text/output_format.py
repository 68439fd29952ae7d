"""The formats in which GLM models write reasoning and tool calls, and how to tell which one a checkpoint speaks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glm5sdk.core.errors import ContractError

__all__ = ["FORMATS", "TAGS", "OutputFormat", "detect_format", "find_format", "starts_in_reasoning"]

TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)


@dataclass(frozen=True)
class OutputFormat:
    """How an output is marked up.

    Attributes:
        name: to ask for it with.
        tags: whether there are `<think>` and `<tool_call>` at all.
        newlines: whether tags stand on lines of their own.
        always_reasons: whether every prompt ends inside the reasoning, whatever the request says.
    """

    name: str
    tags: bool = True
    newlines: bool = False
    always_reasons: bool = False


FORMATS = {
    form.name: form
    for form in (
        OutputFormat("glm45", newlines=True),  # GLM-4.5, 4.6
        OutputFormat("glm47"),  # GLM-4.7, 5, 5.1, 5.2
        OutputFormat("glm53", always_reasons=True),
        OutputFormat("plain", tags=False),
    )
}
_ALIASES = {
    "glm-4.5": "glm45",
    "glm-4.6": "glm45",
    "glm46": "glm45",
    "glm-4.7": "glm47",
    "glm-5": "glm47",
    "glm5": "glm47",
    "glm-5.1": "glm47",
    "glm51": "glm47",
    "glm-5.2": "glm47",
    "glm52": "glm47",
    "glm-5.3": "glm53",
}
_MODEL_TYPES = {"glm_moe_dsa": "glm47", "glm5_next": "glm53"}
# Between a key and its value the newline form has a newline; a template spells it as one, or as an escape.
_NEWLINE_FORM = re.compile(r"</arg_key>(?:\s|\\n)*(?:\n|\\n)(?:\s|\\n)*<arg_value>")


def find_format(name: str) -> OutputFormat:
    """A format by its name, or by a model's ("glm-5.1").

    Raises:
        ContractError: there is none.
    """
    found = FORMATS.get(_ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise ContractError(f"output format: name is {name!r}, needs one of {', '.join([*FORMATS, *_ALIASES])}")
    return found


def detect_format(
    template_source: str | None, *, model_type: str | None = None, name: str | None = None
) -> OutputFormat:
    """The format that a checkpoint's model was trained to write.

    Args:
        template_source: its chat template; None when it has none. A template without a tag is "plain".
        model_type: `model_type` of its config.json, asked when there is no template.
        name: overrides both.

    Raises:
        ContractError: `name` is unknown, or nothing tells.
    """
    if name is not None:
        return find_format(name)
    if template_source is None:
        if model_type in _MODEL_TYPES:
            return FORMATS[_MODEL_TYPES[model_type]]
        raise ContractError(
            f"output format: the chat template is missing and model_type is {model_type!r}, "
            f"needs a template, one of {', '.join(_MODEL_TYPES)}, or a name out of {', '.join(FORMATS)}"
        )
    if _NEWLINE_FORM.search(template_source):
        return FORMATS["glm45"]
    if "<arg_key>" not in template_source and "<think>" not in template_source:
        return FORMATS["plain"]
    # GLM-5.3 chooses an effort and cannot switch reasoning off; every template before it reads enable_thinking.
    always = "reasoning_effort" in template_source and "enable_thinking" not in template_source
    return FORMATS["glm53" if always else "glm47"]


def starts_in_reasoning(prompt: str) -> bool:
    """Whether what follows a rendered prompt is reasoning: its last turn opened `<think>` and did not close it."""
    turn = prompt[prompt.rfind("<|assistant|>") + 1 :]
    return turn.rfind("<think>") > turn.rfind("</think>")
