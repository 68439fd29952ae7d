"""Drafter: the MTP layer proposes the next tokens, and keeps its own rows of the cache up to date."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.nn.cache import CachePools
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.serve.logits import needs_last_token
from glm5sdk.serve.rejection import DRAFT_SEED
from glm5sdk.serve.sequence import Sequence
from glm5sdk.serve.step import Drawn, Group, SampleSettings, paged_batch

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["Drafter"]


class Drafter:
    """Multi-token prediction by the model's own MTP layer.

    The layer's row for position i needs token i + 1, so it follows one step behind: when a step's tokens are drawn, it
    writes its rows for all positions of the step that stand, and then runs on from each sequence's last position,
    feeding itself. A draft is drawn with the target's own noise (same seed, same position), which makes it agree with
    the target's draw as often as the two distributions let it.

    Args:
        model: with an MTP layer.
        pools: the cache, the MTP layer's pools included.
        tokens: drafts a step.
        share_indices: drafts after the first attend to the keys that the first one selected.
        together: draft also when nothing is to be drafted, because other processes do.
        rejection: draw drafts with a noise of their own and keep their distributions for the rejection rule.

    Raises:
        ContractError: the model has no MTP layer.
    """

    def __init__(
        self,
        model: Glm5ForCausalLM,
        pools: CachePools,
        tokens: int,
        share_indices: bool,
        together: bool = False,
        rejection: bool = False,
    ) -> None:
        self.model, self.pools, self.tokens, self.share_indices = model, pools, tokens, share_indices
        self.together = together
        self.distributions: WeakKeyDictionary[Sequence, list[Tensor]] | None = (
            WeakKeyDictionary() if rejection else None
        )
        model.mtp_head()  # says clearly when there is none

    def draft(self, group: Group, hidden_TN: Tensor, next_ids: list[list[int]], results: list[Drawn]) -> None:
        """Write the MTP rows of a step, and propose drafts for the sequences that drew.

        Args:
            group: the step's part.
            hidden_TN: the main model's hidden states [T, N] of its rows.
            next_ids: for each work, the token after each of its rows that stand.
            results: receive the drafts.
        """
        rows, lasts, lengths = [], [], []
        begin = 0
        for work, after in zip(group.works, next_ids, strict=True):
            rows += range(begin, begin + len(after))
            begin += work.count
            lengths.append(len(after))
            lasts.append(len(rows) - 1)
        device = hidden_TN.device
        batch = TokenBatch.paged([w.start for w in group.works], lengths, group.table, self.pools.page_size)
        ids_T = torch.tensor([i for after in next_ids for i in after], dtype=torch.int64, device=device)
        chosen: list[Tensor] = []
        context = self.model.context(batch, self.pools, trace=_keep_indices(chosen))
        drafted_TN = self.model.mtp_hidden_states(ids_T, hidden_TN[rows], context)
        works = [
            i
            for i, w in enumerate(group.works)
            if results[i].tokens and not needs_last_token(w.sequence) and self._room(w.sequence, results[i]) > 0
        ]
        if not works and not self.together:
            return
        indices = chosen[0][[lasts[i] for i in works]] if self.share_indices and chosen else None
        self._propose(group, works, drafted_TN[[lasts[i] for i in works]], indices, lengths, results)

    def taken_distributions(self, sequence: Sequence, count: int) -> Tensor | None:
        """Distributions [count, V] of a sequence's first drafts, which are forgotten; None when it has no drafts."""
        kept = self.distributions.pop(sequence, []) if self.distributions is not None else []
        return torch.stack(kept[:count]) if count else None

    def _room(self, sequence: Sequence, result: Drawn) -> int:
        """Drafts that could still become tokens."""
        return min(self.tokens, sequence.limit - len(sequence.tokens) - len(result.tokens) - 1)

    def _propose(
        self,
        group: Group,
        works: list[int],
        hidden_BN: Tensor,
        indices: Tensor | None,
        lengths: list[int],
        results: list[Drawn],
    ) -> None:
        for ahead in range(self.tokens):
            sequences = [group.works[i].sequence for i in works]
            places = [group.works[i].start + lengths[i] + ahead for i in works]  # positions of the last tokens
            settings = SampleSettings.of(sequences, [place + 1 for place in places], hidden_BN.device)
            logits_BV = ops.linear(hidden_BN, self.model.mtp_head(), out_dtype=torch.float32)
            ids_B = self._sample(logits_BV, settings, sequences)
            for i, token in zip(works, ids_B.tolist(), strict=True):
                results[i].drafts.append(token)
            # Behind a sequence's last place there may be no position any more.
            room = [self._room(sequence, results[i]) for i, sequence in zip(works, sequences, strict=True)]
            stay = [row for row, drafts in enumerate(room) if ahead + 1 < drafts]
            if ahead + 1 == self.tokens or not (stay or self.together):
                return
            works = [works[row] for row in stay]
            batch = paged_batch(group.table, works, [places[row] for row in stay], self.pools.page_size)
            context = self.model.context(batch, self.pools)
            if indices is not None:
                indices = indices[stay]
                self._share(context, indices)
            hidden_BN = self.model.mtp_hidden_states(ids_B[stay], hidden_BN[stay], context)

    def _sample(self, logits_BV: Tensor, settings: SampleSettings, sequences: list[Sequence]) -> Tensor:
        if self.distributions is None:
            return ops.sample(logits_BV, *settings.arguments())[0]
        q_BV = ops.sampling_distribution(logits_BV, *settings.arguments()[:4])
        for sequence, q_V in zip(sequences, q_BV, strict=True):
            self.distributions.setdefault(sequence, []).append(q_V)
        return ops.sample(logits_BV, *replace(settings, seed=settings.seed ^ DRAFT_SEED).arguments())[0]

    def _share(self, context: ForwardContext, indices: Tensor) -> None:
        context.selection = lambda layer, batch, topk: indices


def _keep_indices(chosen: list[Tensor]) -> Any:
    def trace(name: str, value: Any) -> None:
        if name.endswith(".indices"):
            chosen.append(value)

    return trace
