"""Measuring a model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.nn.context import Selection
from glm5sdk.train.data import IGNORED, Batch
from glm5sdk.train.recipe import language_loss

__all__ = ["Score", "accuracy", "evaluate", "selecting"]


@dataclass(frozen=True)
class Score:
    """Loss on a text.

    Attributes:
        nats: mean loss per token, natural log.
        bits_per_byte: all loss in bits over the UTF-8 bytes of the predicted tokens; comparable across tokenizers.
        tokens: predicted tokens.
    """

    nats: float
    bits_per_byte: float
    tokens: int


@contextmanager
def selecting(model: Glm5ForCausalLM, selection: Selection) -> Iterator[None]:
    """Who chooses the keys inside the block; restored after."""
    before = model.selection
    model.selection = selection
    try:
        yield
    finally:
        model.selection = before


def evaluate(
    model: Glm5ForCausalLM, batches: Iterable[Batch], byte_lengths: Tensor, selection: Selection | None = None
) -> Score:
    """Loss of `batches` under a selection (the model's own if None).

    Args:
        model: the model.
        batches: ids and targets.
        byte_lengths: i64 [V], bytes of each token (see data.byte_lengths).
        selection: "dense", "indexer" or a function.
    """
    nats, tokens, size = 0.0, 0, 0
    with selecting(model, model.selection if selection is None else selection):
        for batch in batches:
            loss, counts = language_loss(model, batch)
            nats += float(loss.double().sum())
            tokens += int(counts.sum())
            size += int(byte_lengths[batch.targets[counts].cpu()].sum())
    return Score(nats / max(tokens, 1), nats / math.log(2) / max(size, 1), tokens)


def accuracy(model: Glm5ForCausalLM, batch: Batch, selection: Selection | None = None) -> float:
    """Share of the targets that count which the model's most likely token hits."""
    with selecting(model, model.selection if selection is None else selection), torch.no_grad():
        logits = model(batch.ids)
    counts = batch.targets != IGNORED
    return float((logits.argmax(-1)[counts] == batch.targets[counts]).double().mean())
