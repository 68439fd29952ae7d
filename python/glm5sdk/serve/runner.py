"""ModelRunner: computes steps, one after the other, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.nn.cache import CachePools
from glm5sdk.serve.drafter import Drafter
from glm5sdk.serve.lockstep import Lockstep
from glm5sdk.serve.logits import change_logits, needs_last_token
from glm5sdk.serve.logprobs import token_logprobs
from glm5sdk.serve.outputs import TokenLogprob
from glm5sdk.serve.rejection import accept_drafts
from glm5sdk.serve.sequence import Sequence
from glm5sdk.serve.step import UNKNOWN, Drawn, Group, Step, make_group

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs steps on a model and the pools of its cache. One thread at a time.

    Args:
        model: in eval mode.
        pools: of the cache, the MTP layer's included when a drafter is given.
        drafter: proposes tokens after each step, or None.
        lockstep: the other processes over which the experts are spread, or None.
    """

    def __init__(
        self,
        model: Glm5ForCausalLM,
        pools: CachePools,
        drafter: Drafter | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.model, self.pools, self.drafter, self.lockstep = model, pools, drafter, lockstep
        self.installed: Any = None  # the view whose weights are the model's own
        self._last: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # a sequence keeps its weights alive

    @torch.no_grad()
    def run(self, step: Step) -> list[Drawn]:
        """Compute a step; one result a work, in the order of `step.works`."""
        self.pools.copy_pages([s for s, _ in step.copies], [t for _, t in step.copies])
        groups = list(step.groups)
        if self.lockstep is not None:
            missing = self.lockstep.passes(len(groups)) - len(groups)
            groups += [make_group(None, [], self.pools.page_size, self.model.device)] * missing
        drawn = [result for group in groups for result in self._run_group(group)]
        self._last.clear()
        self._last.update((w.sequence, d.tokens[-1]) for w, d in zip(step.works, drawn, strict=True) if d.tokens)
        return drawn

    def _run_group(self, group: Group) -> list[Drawn]:
        self._fill_in(group)
        with self._weights(group.view):
            hidden_TN = self.model.hidden_states(group.ids, self.model.context(group.batch, self.pools))
            results, next_ids = self._draw(group, hidden_TN)
            self._prompt_logprobs(group, hidden_TN, results)
            if self.drafter is not None:
                self.drafter.draft(group, hidden_TN, next_ids, results)
        return results

    def _weights(self, view: Any) -> AbstractContextManager[Any]:
        return nullcontext() if view is None or view is self.installed else view.active(self.model)

    def _fill_in(self, group: Group) -> None:
        """Put the tokens that the step before drew where this step was made without them."""
        end = 0
        for work in group.works:
            end += work.count
            if work.ahead:
                place = end - 1 - len(work.drafts)
                # A step that failed drew nothing; its sequences have ended, and what is computed here is dropped.
                token = self._last.get(work.sequence, UNKNOWN)
                group.ids[place] = work.ids[place - end + work.count] = token

    def _draw(self, group: Group, hidden_TN: Tensor) -> tuple[list[Drawn], list[list[int]]]:
        """Results, and for each work the token after each of its rows as far as they count.

        A draft counts iff it equals the target's own draw before it, so the tokens are those of plain decoding.
        """
        results = [Drawn(proposed=len(w.drafts)) for w in group.works]
        draws: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        errors: dict[Sequence, str] = {}
        if group.drawers:
            draws, logprobs, errors = self._sample(group, hidden_TN[group.draw_rows])
        next_ids: list[list[int]] = []
        at = 0
        for work, result in zip(group.works, results, strict=True):
            mine, beside = draws[at : at + work.draws], logprobs[at : at + work.draws]
            at += work.draws
            result.tokens = _confirmed(work.drafts, mine)
            result.logprobs = [p for p in beside[: len(result.tokens)] if p is not None]
            result.error = errors.get(work.sequence)
            known = work.ids[1 : work.count - len(work.drafts)]
            after = [] if work.draws else [work.sequence.tokens[work.start + work.count]]
            next_ids.append([*known, *after, *result.tokens])
        return results, next_ids

    def _sample(
        self, group: Group, hidden_RN: Tensor
    ) -> tuple[list[int], list[TokenLogprob | None], dict[Sequence, str]]:
        """Tokens, what is reported beside them, and which sequences cannot go on, and why."""
        logits_RV = self.model.logits(hidden_RN).to(torch.float32)
        own = [row for row, s in enumerate(group.drawers) if needs_last_token(s)]
        changed_RV = logits_RV.clone() if own else logits_RV
        errors: dict[Sequence, str] = {}
        for row in own:
            try:
                change_logits(changed_RV[row], group.drawers[row])
            except ContractError as error:  # a grammar beyond its limits ends its own request, not the step
                errors[group.drawers[row]] = str(error)
        ids, _, _ = ops.sample(changed_RV, *group.settings.arguments())
        draws = ids.tolist()
        if self.drafter is not None and self.drafter.distributions is not None:
            self._reject(group, changed_RV, draws)
        asked = [row for row, s in enumerate(group.drawers) if s.params.logprobs is not None]
        logprobs: list[TokenLogprob | None] = [None] * len(draws)
        if asked:
            tops = [group.drawers[row].params.logprobs or 0 for row in asked]
            targets = [draws[row] for row in asked]
            found = token_logprobs(self.model, hidden_RN[asked], targets, tops, logits_RV[asked])
            for row, entry in zip(asked, found, strict=True):
                logprobs[row] = entry
        return draws, logprobs, errors

    def _reject(self, group: Group, logits_RV: Tensor, draws: list[int]) -> None:
        """Put into the draws what the rejection rule makes of the drafts."""
        assert self.drafter is not None
        end = 0
        for work in group.works:
            begin, end = end, end + work.draws
            count = len(work.drafts)
            q_KV = self.drafter.taken_distributions(work.sequence, count)
            if q_KV is None:
                continue
            rows = slice(begin, begin + count)
            settings = [a[rows] for a in group.settings.arguments()[:4]]
            p_KV = ops.sampling_distribution(logits_RV[rows], *settings)
            place = int(group.settings.position[begin])
            tokens, all_stand = accept_drafts(work.drafts, p_KV, q_KV, work.sequence.seed, place)
            draws[begin : begin + len(tokens)] = tokens
            if not all_stand:  # what is behind the replaced draft must not be taken for confirmed
                work.drafts[len(tokens) - 1 :] = [-1] * (count - len(tokens) + 1)

    def _prompt_logprobs(self, group: Group, hidden_TN: Tensor, results: list[Drawn]) -> None:
        end = 0
        for work, result in zip(group.works, results, strict=True):
            begin, end = end, end + work.count
            if work.prompt_logprobs:
                sequence = work.sequence
                targets = sequence.tokens[work.start + 1 : min(work.start + work.count + 1, sequence.prompt_len)]
                tops = [sequence.params.prompt_logprobs or 0] * len(targets)
                result.prompt_logprobs = token_logprobs(
                    self.model, hidden_TN[begin : begin + len(targets)], targets, tops
                )


def _confirmed(drafts: list[int], draws: list[int]) -> list[int]:
    """The draws up to the first that differs from its draft, itself included: behind it the model saw wrong tokens."""
    good = 0
    while good < len(drafts) and drafts[good] == draws[good]:
        good += 1
    return draws[: good + 1]
