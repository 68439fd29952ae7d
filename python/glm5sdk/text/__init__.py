"""Text in and out of a model: tokenizer, chat template, streaming decoder, reasoning and tool calls."""

from __future__ import annotations

from glm5sdk.text.chat import ChatTemplate, TemplateLimits
from glm5sdk.text.generation_config import GenerationConfig
from glm5sdk.text.output_format import OutputFormat, detect_format, starts_in_reasoning
from glm5sdk.text.output_parser import OutputParser, parse_output
from glm5sdk.text.tokenizer import StreamDecoder, Tokenizer
from glm5sdk.text.tool_calls import render_tool_call

__all__ = [
    "ChatTemplate",
    "GenerationConfig",
    "OutputFormat",
    "OutputParser",
    "StreamDecoder",
    "TemplateLimits",
    "Tokenizer",
    "detect_format",
    "parse_output",
    "render_tool_call",
    "starts_in_reasoning",
]
