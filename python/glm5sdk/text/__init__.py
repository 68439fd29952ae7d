"""Text in and out of a checkpoint: tokenizer, streaming decoder, generation config, chat template."""

from __future__ import annotations

from glm5sdk.text.chat import ChatTemplate, TemplateLimits
from glm5sdk.text.generation_config import GenerationConfig
from glm5sdk.text.tokenizer import StreamDecoder, Tokenizer

__all__ = ["ChatTemplate", "GenerationConfig", "StreamDecoder", "TemplateLimits", "Tokenizer"]
