"""`glm5 quantize`: a float checkpoint to a quantised one, with a report of what that cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from glm5sdk.cli.choose import chosen
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM
from glm5sdk.models.glm5.checkpoint import open_checkpoint
from glm5sdk.models.glm5.loading import save_pretrained
from glm5sdk.quant import METHODS, Report, check_model, compare_logits, held_out_states, quantise_model, scheme
from glm5sdk.quant.report import KINDS
from glm5sdk.text.tokenizer import Tokenizer
from glm5sdk.train.data import find_texts, split_files, standard_library

__all__ = ["REPORT", "quantize_checkpoint"]

REPORT = "quantization_report.json"
_SUFFIXES = (".txt", ".md", ".py")
_HELD_OUT = 0.05  # as in training: a model of this SDK keeps what it never saw
_SEQUENCE = 256


def quantize_checkpoint(
    console: Console,
    source: Path,
    name: str,
    out: Path,
    calibration: Path | None,
    tokens: int,
    method: str,
    dtype: str,
    device: str,
    backends: Sequence[str],
) -> None:
    """Quantise `source` by the scheme `name` into `out`, and print and save the report.

    Raises:
        ContractError: an argument does not fit, the checkpoint is quantised already, or text is missing; nothing was
            written.
        CheckpointError: the source is damaged.
    """
    chosen_scheme = scheme(name)
    if method not in METHODS:
        raise ContractError(f"quantize: method is {method!r}, needs one of {', '.join(METHODS)}")
    if tokens < 1:
        raise ContractError(f"quantize: tokens is {tokens}, needs at least 1")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ContractError(f"quantize: {out} exists and is not empty, needs a new or empty folder")
    config = Glm5Config.from_pretrained(source)
    _refuse_quantised(source, config)
    files = find_texts([calibration] if calibration is not None else standard_library(), _SUFFIXES)
    calibrate, held_out = _texts(Tokenizer.from_pretrained(source), files, tokens, config)
    with chosen(backends):
        model = Glm5ForCausalLM.from_pretrained(source, dtype=dtype, device=device)
        check_model(model, chosen_scheme)
        before = held_out_states(model, held_out)
        with console.status("quantising") as status:
            report = quantise_model(
                model, chosen_scheme, calibrate, method,
                lambda layer: status.update(f"quantised layer {layer + 1} of {model.config.num_layers}"),
            )  # fmt: skip
        report.divergence = compare_logits(model, held_out, before)
    save_pretrained(model, out, 5 * 10**9, {REPORT: report.to_json()})
    show(console, report, str(model.dtype).removeprefix("torch."))
    console.print(
        f"{out}: {report.bytes_after['total'] / 1e6:.1f} MB; the report is in {out / REPORT}", highlight=False
    )


def _refuse_quantised(source: Path, config: Glm5Config) -> None:
    kinds = set(open_checkpoint(source, config).kinds.values()) - {"plain"}
    if kinds:
        raise ContractError(
            f"quantize: {source} is {', '.join(sorted(kinds))} already, needs float weights; go back to the checkpoint "
            "it was made from, or `glm5 convert` FP8 blocks to bfloat16"
        )


def _texts(tokenizer: Tokenizer, files: Sequence[Path], tokens: int, config: Glm5Config) -> tuple[Tensor, Tensor]:
    """(calibration, held-out) ids [B, S]: of different files, or of one file's beginning and end."""
    length = min(_SEQUENCE, config.max_position_embeddings)
    if len(files) > 1:
        streams = [_stream(tokenizer, part, tokens) for part in split_files(files, _HELD_OUT)]
    else:
        stream = _stream(tokenizer, files, 2 * tokens)
        middle = len(stream) // 2
        streams = [stream[:middle], stream[middle:]]
    for what, stream in zip(("calibration", "held-out"), streams, strict=True):
        if not stream:
            raise ContractError(f"quantize: {what} text is 0 tokens long, needs at least 1; give more text")
        if max(stream) >= config.vocab_size:
            raise ContractError(
                f"quantize: the tokenizer gives id {max(stream)}, needs ids below vocab_size {config.vocab_size}"
            )
    return _rows(streams[0], length), _rows(streams[1], length)


def _stream(tokenizer: Tokenizer, files: Sequence[Path], tokens: int) -> list[int]:
    """The first `tokens` tokens of pieces from files all over the list: few whole ones would be one author's style."""
    count = min(len(files), math.ceil(tokens / _SEQUENCE))
    step, share = len(files) // count, math.ceil(tokens / count)
    spread = list(files[::step])
    stream: list[int] = []
    for file in spread + sorted(set(files) - set(spread)):
        if len(stream) >= tokens:
            break
        stream += tokenizer.encode(file.read_text("utf-8", errors="replace"))[:share]
    return stream[:tokens]


def _rows(stream: list[int], length: int) -> Tensor:
    """Whole sequences [B, S]; a stream shorter than one is one shorter sequence."""
    length = min(length, len(stream))
    return torch.tensor(stream[: len(stream) // length * length]).view(-1, length)


def show(console: Console, report: Report, dtype: str) -> None:
    """Print the report: a table by layer, one by kind of module, and a line about distributions."""
    layers = Table(title=f"{report.scheme}: output error by layer, % ({report.calibration_tokens} tokens)")
    layers.add_column("layer")
    for kind in KINDS:
        layers.add_column(kind, justify="right")
    layers.add_column("keys kept", justify="right")
    blocks = {kind: report.blocks(kind) for kind in KINDS}
    for layer in sorted({m.layer for m in report.modules}):
        cells = [blocks[kind].get(layer, math.nan) for kind in KINDS] + [report.keys_kept.get(layer, math.nan)]
        layers.add_row(str(layer), *map(_percent, cells))
    console.print(layers)

    kinds = Table(title=f"by kind of module, from {dtype}")
    for column in ("kind", "nearest rounding, %", f"{report.method}, %", "MB before", "MB after", "change"):
        kinds.add_column(column, justify="left" if column == "kind" else "right")
    for kind in (*KINDS, "other", "total"):
        nearest, error = report.linears(kind)
        before, after = (f"{b.get(kind, 0) / 1e6:.2f}" for b in (report.bytes_before, report.bytes_after))
        kinds.add_row(kind, _percent(nearest), _percent(error), before, after, f"{report.saving(kind):+.1%}")
    console.print(kinds)
    d = report.divergence
    if d is not None:
        console.print(
            f"held-out text, {d.tokens} tokens: KL {d.kl_mean:.5f} nats per token (largest {d.kl_max:.4f}), perplexity "
            f"{d.perplexity_before:.3f} -> {d.perplexity_after:.3f} "
            f"({d.perplexity_after / d.perplexity_before - 1:+.2%}), same first choice {d.agreement:.1%}",
            highlight=False,
        )


def _percent(error: float) -> str:
    return "" if math.isnan(error) else f"{100 * error:.2f}"
