"""Forced tool calls: whatever is drawn under the grammar of a request's tools is read back as calls of these tools."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from glm5sdk.serve import StructuredOutput
from glm5sdk.serve.guidance import compile_guide
from glm5sdk.serve.server.tool_grammar import tool_grammar
from glm5sdk.text import Tokenizer, parse_output
from glm5sdk.text.output_format import TAGS

pytest.importorskip("llguidance")
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


def _tokenizer(special: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|observation|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    return Tokenizer(backend)


def _draw(tokenizer: Tokenizer, structured: StructuredOutput, draw: random.Random) -> list[int]:
    stop = tokenizer.token_id("<|observation|>")
    tags = {tokenizer.token_id(tag) for tag in TAGS}
    state = compile_guide(structured, tokenizer, tokenizer.vocab_size + 7, (stop,))
    tokens: list[int] = []
    while not state.is_finished:
        choices = torch.nonzero(state.mask()).flatten().tolist()
        liked = [token for token in choices if token in tags or token == stop]  # a tag's own token, and on to the end
        token = draw.choice(liked if liked and draw.random() < 0.5 else choices)
        assert state.accept(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("after_reasoning", [False, True])
def test_forced_calls_are_read_back(special, after_reasoning) -> None:
    tokenizer, seen, with_tags = _tokenizer(special), set(), 0
    structured = StructuredOutput("grammar", tool_grammar(TOOLS, parallel=True), after_reasoning)
    for seed in range(30):
        tokens = _draw(tokenizer, structured, random.Random(seed))
        text = tokenizer.stream(skip_special_tokens=False).push(tokens)
        message = parse_output(text, "glm47", TOOLS, after_reasoning)
        assert message.content == "" and message.tool_calls
        for call in message.tool_calls:
            arguments = json.loads(call.arguments)
            seen.add(call.name)
            assert call.complete
            if call.name == "get_weather":
                assert isinstance(arguments["city"], str) and arguments.get("unit", "C") in ("C", "F")
                assert type(arguments.get("days", 0)) is int
            else:
                assert call.name == "now" and arguments == {}
        with_tags += tokenizer.token_id("<tool_call>") in tokens
    assert seen == {"get_weather", "now"} and with_tags
