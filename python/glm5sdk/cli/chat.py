"""`glm5 chat`: a conversation in the terminal by the checkpoint's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from glm5sdk.cli.choose import chosen
from glm5sdk.cli.write import Sampling, Writer
from glm5sdk.text.chat import ChatTemplate

__all__ = ["converse"]


def converse(
    console: Console,
    errors: Console,
    path: Path,
    system: str,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    thinking: bool,
    dtype: str,
    backends: Sequence[str],
) -> None:
    """Read lines, answer each, remember the conversation; an empty line or the end of input ends it."""
    with chosen(backends):
        template = ChatTemplate.from_pretrained(path)
        writer = Writer(path, dtype)
        defaults = writer.generation
        sampling = Sampling(
            max_new_tokens,
            defaults.temperature if temperature is None else temperature,
            defaults.top_p if top_p is None else top_p,
            defaults.top_k,
            seed,
        )
        messages = [{"role": "system", "content": system}] if system else []
        errors.print(f"[dim]{path}; an empty line ends the conversation[/]", highlight=False)
        while line := _read(console):
            messages.append({"role": "user", "content": line})
            text = template.render(messages, add_generation_prompt=True, enable_thinking=thinking)
            new, seconds = writer.write(writer.tokenizer.encode(text), sampling)
            answer = writer.tokenizer.decode([t for t in new if t not in writer.stops])
            messages.append({"role": "assistant", "content": answer})
            errors.print(f"[dim]{len(new)} tokens, {len(new) / seconds:.1f} tokens/s[/]", highlight=False)


def _read(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""
