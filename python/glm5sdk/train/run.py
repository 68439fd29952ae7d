"""`train(config)`: from text files to a trained, measured and saved model."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.models.glm5.presets import preset
from glm5sdk.train.bpe import END, save_tokenizer, train_tokenizer
from glm5sdk.train.checkpoint import latest_checkpoint, load_state, save_state
from glm5sdk.train.config import TrainConfig
from glm5sdk.train.data import Windows, byte_lengths, find_texts, split_files, tokenise
from glm5sdk.train.evaluate import Score, evaluate
from glm5sdk.train.progress import Progress
from glm5sdk.train.trainer import Record, Trainer

__all__ = ["Evaluation", "TrainResult", "peak_memory_bytes", "train"]


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures after a step.

    Attributes:
        step: steps done.
        dense, sparse: scores with attention over all keys and over the selected ones.
    """

    step: int
    dense: Score
    sparse: Score

    @property
    def gap(self) -> float:
        """What the selection costs: sparse minus dense loss, nats per token."""
        return self.sparse.nats - self.dense.nats


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
        model, tokenizer: as trained; `save` writes both.
        history: a Record for each step.
        evaluations: the last one is of the finished model.
        tokens_per_second: of training, by kind of phase.
        peak_memory: of the process (or the device), bytes.
        checkpoint: the last resumable checkpoint, None without `out`.
    """

    model: Glm5ForCausalLM
    tokenizer: tokenizers.Tokenizer
    history: list[Record]
    evaluations: list[Evaluation]
    tokens_per_second: dict[str, float]
    peak_memory: int
    checkpoint: Path | None

    @property
    def final(self) -> Evaluation:
        """Figures of the finished model."""
        return self.evaluations[-1]

    def save(self, folder: str | PathLike[str]) -> None:
        """Write a Hugging Face checkpoint with its tokenizer."""
        self.model.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder, self.model.config.max_position_embeddings)


def train(config: TrainConfig) -> TrainResult:
    """Run a whole recipe: tokenizer, data, phases, evaluation, checkpoints.

    Raises:
        ContractError: data or settings do not fit; nothing was written.
        CheckpointError: the checkpoint to start or resume from is missing or damaged.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    files, held_out = split_files(find_texts(config.data, config.suffixes), config.held_out)
    source = _source(config)
    base = _base_config(config, source)
    with Progress(config.progress) as progress:
        tokenizer = _tokenizer(source, files, base.vocab_size, progress)
        model = _model(config, base, source, tokenizer)
        end = _token(tokenizer, END)
        progress.say("reading the text")
        data = Windows(tokenise(files, tokenizer, end), config.batch_size, config.seq_len, config.seed)
        measure = _Measure(config, tokenise(held_out, tokenizer, end), byte_lengths(tokenizer, base.vocab_size))
        trainer = Trainer(
            model, data, config.phases, config.optimizer, mtp_weight=config.mtp_weight, kl_weight=config.kl_weight,
            balance_rate=config.balance_rate,
        )  # fmt: skip
        evaluations: list[Evaluation] = []
        if config.out is not None:
            _remember_tokenizer(model, tokenizer, Path(config.out) / "tokenizer")
        if config.resume and source is not None:
            state = load_state(source)
            trainer.load_state_dict(state)
            evaluations = [_evaluation(e) for e in state["evaluations"]]
        return _run(config, trainer, tokenizer, measure, evaluations, progress)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the device on CUDA, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Measure:
    """Evaluates on the same held-out windows every time."""

    def __init__(self, config: TrainConfig, stream: Tensor, lengths: Tensor) -> None:
        windows = Windows(stream, 1, config.seq_len, 0, shuffle=False)
        count = min(config.eval_sequences, windows.windows)
        # Spread over the whole held-out text, in batches of the training size.
        spread = [i * windows.windows // count for i in range(count)]
        self._starts = [spread[i : i + config.batch_size] for i in range(0, count, config.batch_size)]
        self._windows, self._lengths, self._device = windows, lengths, config.device

    def __call__(self, model: Glm5ForCausalLM, step: int) -> Evaluation:
        batches = [self._windows.rows(numbers, self._device) for numbers in self._starts]
        dense = evaluate(model, batches, self._lengths, "dense")
        return Evaluation(step, dense, evaluate(model, batches, self._lengths))


def _run(
    config: TrainConfig,
    trainer: Trainer,
    tokenizer: tokenizers.Tokenizer,
    measure: _Measure,
    evaluations: list[Evaluation],
    progress: Progress,
) -> TrainResult:
    checkpoint: Path | None = None

    def save() -> None:
        nonlocal checkpoint
        if config.out is not None:
            state = {**trainer.state_dict(), "evaluations": [_plain(e) for e in evaluations]}
            checkpoint = save_state(config.out, trainer.model, state, trainer.step, keep=2)

    def on_step(record: Record) -> None:
        progress.show(trainer, record, config.phases)
        if config.eval_every and record.step % config.eval_every == 0 and not trainer.done:
            evaluations.append(measure(trainer.model, record.step))
        if config.save_every and record.step % config.save_every == 0 and not trainer.done:
            save()

    trainer.run(on_step)
    progress.say("measuring on held-out text")
    if not evaluations or evaluations[-1].step != trainer.step:
        evaluations.append(measure(trainer.model, trainer.step))
    save()
    trainer.model.requires_grad_(True).eval()
    return TrainResult(
        trainer.model, tokenizer, trainer.history, evaluations, _speed(trainer.history),
        peak_memory_bytes(trainer.model.device), checkpoint,
    )  # fmt: skip


def _speed(history: list[Record]) -> dict[str, float]:
    """Tokens per second by kind of phase."""
    speed = {}
    for kind in dict.fromkeys(r.kind for r in history):
        records = [r for r in history if r.kind == kind]
        speed[kind] = sum(r.tokens for r in records) / max(sum(r.seconds for r in records), 1e-9)
    return speed


def _source(config: TrainConfig) -> Path | None:
    """The checkpoint whose tokenizer and weights the run begins with."""
    if config.resume and config.out is not None and (newest := latest_checkpoint(config.out)) is not None:
        return newest
    return None if config.start is None else Path(config.start)


def _base_config(config: TrainConfig, source: Path | None) -> Glm5Config:
    if source is not None:
        base = Glm5Config.from_pretrained(source)
    else:
        base = preset(config.model) if isinstance(config.model, str) else config.model
    if config.seq_len > base.max_position_embeddings:
        raise ContractError(
            f"train: seq_len is {config.seq_len}, needs at most max_position_embeddings {base.max_position_embeddings}"
        )
    return base.replace(dtype="float32")


def _tokenizer(source: Path | None, files: list[Path], vocab_size: int, progress: Progress) -> tokenizers.Tokenizer:
    if source is None:
        progress.say("training the tokenizer")
        return train_tokenizer(files, vocab_size)
    file = source / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: file is missing, needs the tokenizer of the checkpoint")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size(with_added_tokens=True) > vocab_size:
        raise CheckpointError(f"{file}: vocabulary is larger than the model's, needs at most {vocab_size} tokens")
    return tokenizer


def _token(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    index = tokenizer.token_to_id(token)
    if index is None:
        raise ContractError(f"train: tokenizer has no {token}, needs it to end texts")
    return index


def _model(
    config: TrainConfig, base: Glm5Config, source: Path | None, tokenizer: tokenizers.Tokenizer
) -> Glm5ForCausalLM:
    if source is not None:
        model = Glm5ForCausalLM.from_pretrained(source, dtype="float32", device=config.device, progress=False)
        if model.weight_kinds:
            raise ContractError(
                f"train: weights of {source} are {', '.join(sorted(model.weight_kinds))}, needs float ones, which "
                "alone have gradients; start from the checkpoint that was quantised"
            )
        return model
    end = _token(tokenizer, END)
    stops = [tokenizer.token_to_id(token) for token in (END, "<|user|>", "<|observation|>")]
    torch.manual_seed(config.seed)
    fresh = base.replace(eos_token_id=tuple(i for i in stops if i is not None), pad_token_id=end)
    return Glm5ForCausalLM(fresh).to(config.device)


def _remember_tokenizer(model: Glm5ForCausalLM, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """So that every checkpoint of the model carries it."""
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    model.companions = {file.name: file for file in sorted(folder.iterdir())}


def _plain(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "step": evaluation.step,
        "dense": [evaluation.dense.nats, evaluation.dense.bits_per_byte, evaluation.dense.tokens],
        "sparse": [evaluation.sparse.nats, evaluation.sparse.bits_per_byte, evaluation.sparse.tokens],
    }


def _evaluation(plain: dict[str, Any]) -> Evaluation:
    return Evaluation(plain["step"], Score(*plain["dense"]), Score(*plain["sparse"]))
