"""GLM-5's recipe: which parameters a phase trains, and by which losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.train.config import Phase
from glm5sdk.train.data import IGNORED, Batch

__all__ = ["Losses", "balance_routers", "compute_losses", "freeze", "language_loss"]


@dataclass(frozen=True)
class Losses:
    """Losses of one step, each a mean over what it counts, in nats.

    Attributes:
        total: what is differentiated.
        language: next token; 0 while only the indexers train.
        mtp: token after next; 0 without an MTP layer.
        kl: distance of each indexer to the attention it stands for, summed over layers; 0 in the dense phase.
        experts: chosen expert ids i32 [T, A] by layer, for balancing.
    """

    total: Tensor
    language: float
    mtp: float
    kl: float
    experts: dict[int, Tensor]


def freeze(model: Glm5ForCausalLM, kind: str) -> None:
    """Let a phase's parameters, and no others, have gradients: all but indexers, indexers only, or all.

    Raises:
        ContractError: an indexer phase for a model without one.
    """
    found = False
    for name, parameter in model.named_parameters():
        is_indexer = ".indexer." in name
        found = found or is_indexer
        parameter.requires_grad_(kind == "sparse" or is_indexer == (kind == "indexer"))
    if kind == "indexer" and not found:
        raise ContractError(
            f"train: sparse_pattern is {model.config.sparse_pattern!r}, needs 'indexer' for a phase of kind indexer"
        )


def compute_losses(model: Glm5ForCausalLM, batch: Batch, phase: Phase, mtp_weight: float, kl_weight: float) -> Losses:
    """Forward pass of one phase; call `total.backward()` on the result.

    The model's `selection` must be "dense", or its own in a sparse phase. The indexers' loss has no gradient outside
    them: their inputs and the attention they imitate are detached.

    Args:
        model: frozen for the phase.
        batch: i64 [B, S] ids and targets.
        phase: decides the losses.
        mtp_weight: see TrainConfig.
        kl_weight: see TrainConfig; while only the indexers train it is 1.
    """
    sequences, length = batch.ids.shape
    tokens = TokenBatch.packed([length] * sequences, model.device)
    only_indexer = phase.kind == "indexer"
    collect_kl = phase.kind != "dense"
    experts: dict[int, Tensor] = {}
    zero = torch.zeros((), device=model.device)
    language, mtp = zero, zero
    kls: list[Tensor] = []

    context = model.context(tokens, collect_kl=collect_kl, trace=_record(experts))
    hidden_TN = model.hidden_states(batch.ids.flatten(), context)
    kls += context.kl.values()
    if not only_indexer:
        language = _mean_loss(hidden_TN, model.lm_head.weight, batch.targets)
    if model.model.mtp is not None and (mtp_weight or collect_kl):
        next_ids, after_next = _shifted(batch)
        context = model.context(tokens, collect_kl=collect_kl, trace=_record(experts))
        mtp_hidden_TN = model.mtp_hidden_states(next_ids.flatten(), hidden_TN, context)
        kls += context.kl.values()
        if not only_indexer:
            mtp = _mean_loss(mtp_hidden_TN, model.mtp_head(), after_next)
    kl = torch.stack([layer.mean() for layer in kls]).sum() if kls else zero
    total = kl if only_indexer else language + mtp_weight * mtp + kl_weight * kl
    return Losses(total, float(language.detach()), float(mtp.detach()), float(kl.detach()), experts)


def language_loss(model: Glm5ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss of each target in nats and whether it counts, both [B, S]; no gradients."""
    sequences, length = batch.ids.shape
    with torch.no_grad():
        context = model.context(TokenBatch.packed([length] * sequences, model.device))
        hidden_TN = model.hidden_states(batch.ids.flatten(), context)
        loss_T, _ = ops.linear_cross_entropy(hidden_TN, model.lm_head.weight, batch.targets.flatten())
    return loss_T.view_as(batch.targets), batch.targets != IGNORED


def balance_routers(model: Glm5ForCausalLM, experts: dict[int, Tensor], rate: float) -> None:
    """Nudge each router's bias by `rate` towards experts that got less than their share.

    Source: Wang and others 2024, loss-free balancing, as DeepSeek-V3 and GLM-5 train; no auxiliary loss disturbs the
    gradient.
    """
    for layer, ids in experts.items():
        bias = model.model.layers[layer].mlp.gate.e_score_correction_bias  # type: ignore[union-attr]
        if isinstance(bias, Tensor):
            load = torch.bincount(ids.flatten().long(), minlength=bias.numel()).to(bias.dtype)
            bias += rate * (load.mean() - load).sign()


def _mean_loss(hidden_TN: Tensor, head_VN: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over targets that count; 0 when none does."""
    loss_T, _ = ops.linear_cross_entropy(hidden_TN, head_VN, targets.flatten())
    return loss_T.sum() / (targets != IGNORED).sum().clamp(min=1)


def _shifted(batch: Batch) -> tuple[Tensor, Tensor]:
    """(the token after each position, the target after that), i64 [B, S]; a sequence's last position learns nothing."""
    next_ids = torch.cat([batch.ids[:, 1:], batch.ids[:, -1:]], dim=1)
    nothing = torch.full_like(batch.targets[:, :1], IGNORED)
    return next_ids, torch.cat([batch.targets[:, 1:], nothing], dim=1)


def _record(experts: dict[int, Tensor]) -> Callable[[str, Any], None]:
    def trace(name: str, value: Any) -> None:
        _, layer, what = name.split(".")
        if what == "experts":
            experts[int(layer)] = value

    return trace
