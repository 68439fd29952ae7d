"""lm-eval over HTTP gets what the engine gives in a program: the same floats, the same text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from glm5sdk.serve import LLM, SamplingParams
from glm5sdk.serve.outputs import TokenLogprob
from glm5sdk.serve.server.model_text import DEFAULT_TEMPLATE
from glm5sdk.text.chat import ChatTemplate

pytestmark = pytest.mark.full

Client = Callable[[str, dict[str, Any]], Any]
LENGTH = 512
WORDS = ("def", "return", "self", "import", "for x in", "naïve", "日本", "1 +", "lambda", "{}", "\n", "\t", "#", "🙂")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    engine = LLM(checkpoint)
    yield engine
    engine.shutdown()


def arguments(server: str, checkpoint: Path, route: str = "completions", **more: Any) -> dict[str, Any]:
    return {
        "model": "checkpoint",
        "base_url": f"{server}/v1/{route}",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(checkpoint),
        "max_length": LENGTH,
        **more,
    }


def pairs(llm: LLM, count: int) -> list[tuple[str, str]]:
    """Contexts and continuations; every third continuation is the model's own choice, so that some are greedy."""
    draw = random.Random(5)
    contexts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))).strip() or "x" for _ in range(count - 1)]
    contexts.append(("long " * LENGTH).strip())  # lm-eval cuts it on the left
    own = llm.generate(contexts[::3], SamplingParams(temperature=0.0, max_tokens=4))
    said = {context: output.outputs[0].text for context, output in zip(contexts[::3], own, strict=True)}
    return [(c, said.get(c, "").rstrip() or " " + " ".join(draw.choices(WORDS, k=3))) for c in contexts]


def scored(llm: LLM, rows: Sequence[tuple[list[int], int]]) -> list[list[TokenLogprob]]:
    """Log-probabilities of (tokens, how many of them are context)."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([tokens for tokens, _ in rows], params)
    return [
        [entry for entry in (output.prompt_logprobs or [])[context:] if entry is not None]
        for output, (_, context) in zip(outputs, rows, strict=True)
    ]


@pytest.mark.parametrize("how", [{"batch_size": 1}, {"batch_size": 8}, {"num_concurrent": 6}], ids=str)
def test_loglikelihood(how: dict[str, int], server: str, checkpoint: Path, llm: LLM, run_client: Client) -> None:
    asked = pairs(llm, 60)
    rows = []
    for context, continuation in asked:
        whole, before = llm.tokenizer.encode(context + continuation), len(llm.tokenizer.encode(context))
        cut = max(0, len(whole) - (LENGTH - 1))
        rows.append((whole[cut:], before - cut))
    expected = scored(llm, rows)
    told = run_client(
        "lm_eval_client.py",
        {
            "model": "local-completions",
            "arguments": arguments(server, checkpoint, **how),
            "kind": "loglikelihood",
            "requests": asked,
            "expected": [[entry.logprob for entry in entries] for entries in expected],
        },
    )
    greedy = [all(entry.logprob == entry.top[0][1] for entry in entries) for entries in expected]
    assert told["answers"] == [list(pair) for pair in zip(told["sums"], greedy, strict=True)], "the very floats"
    assert any(greedy) and not all(greedy)


def test_loglikelihood_rolling(server: str, checkpoint: Path, llm: LLM, run_client: Client) -> None:
    texts = ["x", "def f(x):\n    return x\n" * 3, "naïve 日本 🙂 " * 100]
    window = LENGTH - 2  # lm-eval keeps a token for the context and one for the answer
    (prefix,) = llm.tokenizer.encode("<|endoftext|>")
    expected: list[float] = []
    for text in texts:
        tokens = llm.tokenizer.encode(text)
        total = 0.0
        for start in range(0, len(tokens), window):
            end = min(start + window, len(tokens))
            begin = max(0, end - window)
            before = [prefix] if start == 0 else tokens[begin - 1 : start]
            (entries,) = scored(llm, [([*before, *tokens[start:end]], len(before))])
            total += sum(entry.logprob for entry in entries)
        expected.append(total)
    told = run_client(
        "lm_eval_client.py",
        {
            "model": "local-completions",
            "arguments": arguments(server, checkpoint),
            "kind": "loglikelihood_rolling",
            "requests": [(text,) for text in texts],
        },
    )
    assert len(llm.tokenizer.encode(texts[-1])) > 2 * window
    assert told["answers"] == pytest.approx(expected, rel=1e-12), "added up in another order, maybe"


@pytest.mark.parametrize("how", [{"batch_size": 1}, {"batch_size": 4}, {"num_concurrent": 4}], ids=str)
def test_generate_until(how: dict[str, int], server: str, checkpoint: Path, llm: LLM, run_client: Client) -> None:
    contexts = ["def main(", "import ", "class A:\n    def ", "x = [1, 2, ", "# a\n\n", "for i in"]
    free = llm.generate(contexts, SamplingParams(temperature=0.0, max_tokens=40))
    # Stop strings from the middle of what is said, so that most of them strike.
    until = [out.outputs[0].text[4:6] or "\n\n" for out in free[:4]] + ["never said at all"]
    offline = llm.generate(contexts, SamplingParams(temperature=0.0, max_tokens=40, stop=until))
    expected = [out.outputs[0].text for out in offline]
    told = run_client(
        "lm_eval_client.py",
        {
            "model": "local-completions",
            "arguments": arguments(server, checkpoint, **how),
            "kind": "generate_until",
            "requests": [(context, {"until": until, "max_gen_toks": 40, "do_sample": False}) for context in contexts],
        },
    )
    assert told["answers"] == expected
    assert any(len(cut) < len(out.outputs[0].text) for cut, out in zip(expected, free, strict=True))


def test_chat_generate_until(server: str, checkpoint: Path, llm: LLM, run_client: Client) -> None:
    questions = ["hi", "def main(", "日本", "what is 1 + 1?"]
    plain = {"enable_thinking": False}
    template = ChatTemplate(DEFAULT_TEMPLATE.read_text(encoding="utf-8"))
    if (checkpoint / "chat_template.jinja").exists():
        template = ChatTemplate.from_pretrained(checkpoint)
    prompts = [
        template.render([{"role": "user", "content": question}], add_generation_prompt=True, **plain)
        for question in questions
    ]
    free = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30))
    until = [free[0].outputs[0].text[3:5] or "\n\n"]
    offline = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30, stop=until))
    told = run_client(
        "lm_eval_client.py",
        {
            "model": "local-chat-completions",
            "arguments": arguments(server, checkpoint, "chat/completions"),
            "kind": "generate_until",
            "chat": True,
            "requests": [(q, {"until": until, "max_gen_toks": 30, "chat_template_kwargs": plain}) for q in questions],
        },
    )
    assert told["answers"] == [out.outputs[0].text for out in offline]
