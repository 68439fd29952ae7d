"""Scheduler: which sequences run, which rows of theirs the next step computes, and whose the pages are."""

from __future__ import annotations

from collections import deque

import torch

from glm5sdk.serve.admission import AdmissionPolicy
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.logits import needs_last_token
from glm5sdk.serve.pages import PagePool
from glm5sdk.serve.policy import SchedulingPolicy
from glm5sdk.serve.prefix_cache import Match, RadixCache
from glm5sdk.serve.sequence import Sequence
from glm5sdk.serve.step import UNKNOWN, Group, Step, Work, make_group

__all__ = ["Scheduler"]


class Scheduler:
    """Holds every sequence that is not finished, and plans steps.

    A sequence is in the admission queue, ready (let through, or preempted, and waiting for pages) or running.

    Args:
        config: sizes and switches.
        pages: of the cache.
        cache: of prefixes, over the same pages; None keeps none.
        admission: the queue.
        policy: choices.
        device: of the tensors made.
    """

    def __init__(
        self,
        config: EngineConfig,
        pages: PagePool,
        cache: RadixCache | None,
        admission: AdmissionPolicy,
        policy: SchedulingPolicy,
        device: torch.device,
    ) -> None:
        self.config, self.pages, self.cache = config, pages, cache
        self.admission, self.policy, self.device = admission, policy, device
        self.ready: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted = 0
        self._copies: list[tuple[int, int]] = []

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence.

        Raises:
            OverloadedError: the queue is full.
        """
        self.admission.offer(sequence, now)

    def plan(self, now: float, ahead: bool) -> Step | None:
        """The next step, None when there is nothing to compute now.

        Args:
            now: seconds, for the queue.
            ahead: the step before this one is still running: its draws are not known.
        """
        works: list[Work] = []
        budget = self.config.max_num_batched_tokens
        for sequence in self.policy.order(self.running):
            if sequence in self.running and (work := self._continue(sequence, budget, works, ahead)):
                works.append(work)
                budget -= work.count
        for sequence in self._admit(now):
            if budget <= 0 or (work := self._start(sequence, budget, works)) is None:
                break
            if sequence.started is None:
                sequence.started = now
            self.ready.remove(sequence)
            self.running.append(sequence)
            works.append(work)
            budget -= work.count
        if not works:
            return None
        groups: dict[int, list[Work]] = {}
        for work in works:
            groups.setdefault(id(work.sequence.view), []).append(work)
        copies, self._copies = self._copies, []
        return Step([self._group(part) for part in groups.values()], copies, now)

    def settle(self, step: Step) -> None:
        """A planned step is done: pages it copied from may go."""
        self.pages.release([source for source, _ in step.copies])

    def share_prefix(self, sequence: Sequence, whole_pages: bool) -> None:
        """Give the rows computed so far to the prefix cache; with `whole_pages` not those of a page still filling."""
        if self.cache is None or not sequence.current:
            return
        size = self.config.page_size
        # A stop string may have cut tokens whose rows were computed.
        rows = min(sequence.computed, len(sequence.tokens) - self.cache.lookahead)
        if whole_pages:
            rows = rows // size * size
        if rows <= sequence.inserted:
            return
        tokens = sequence.tokens[: rows + self.cache.lookahead]
        sequence.pages = self.cache.insert(sequence.namespace, tokens, sequence.pages)
        sequence.inserted = rows

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its pages at once.

        A step in flight may still write to them; that is no harm, as whoever gets them next writes later.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.ready:
            self.ready.remove(sequence)
        else:
            self.admission.remove(sequence.request_id)
        self._give_back(sequence)

    def everyone(self) -> list[Sequence]:
        """Running and ready sequences."""
        return [*self.running, *self.ready]

    def waiting(self) -> int:
        """Sequences that do not run."""
        return len(self.ready) + len(self.admission)

    def waiting_tokens(self) -> int:
        """Tokens that they have to read."""
        return sum(s.prompt_tokens for s in self.ready) + self.admission.waiting_tokens

    def _continue(self, sequence: Sequence, budget: int, works: list[Work], ahead: bool) -> Work | None:
        wanted = sequence.length - sequence.planned
        if not wanted or (sequence.length >= sequence.limit and sequence.ahead):
            return None
        if ahead and sequence.ahead and needs_last_token(sequence):
            return None
        drafts = sequence.drafts if wanted == 1 else []
        count = self.policy.share(wanted + len(drafts), budget, _rows(works), self._may_cut(sequence))
        drafts = drafts[: max(0, count - wanted)]
        if count <= 0 or not self._make_room(sequence, sequence.planned + count, works):
            return None
        return self._work(sequence, count, drafts)

    def _may_cut(self, sequence: Sequence) -> bool:
        return self.config.enable_chunked_prefill or sequence.length - sequence.planned == 1

    def _make_room(self, sequence: Sequence, rows: int, works: list[Work]) -> bool:
        """Pages for so many rows and the drafts behind them; others yield theirs if it must be."""
        need = -(-(rows + self._draft_rows()) // self.config.page_size) - len(sequence.pages)
        while need > 0:
            got = self.take_pages(need)
            if got is not None:
                sequence.pages += got
                return True
            busy = {id(w.sequence) for w in works}
            others = [s for s in self.running if id(s) not in busy and s is not sequence]
            victim = max([*others, sequence], key=self.policy.rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _draft_rows(self) -> int:
        """Rows past a step's own that drafting writes in the MTP layer's pool."""
        return self.config.speculative_tokens

    def take_pages(self, count: int) -> list[int] | None:
        """So many pages, given up by the prefix cache if need be; None, and nothing taken, when there are too few."""
        short = count - self.pages.free
        if short > 0 and self.cache is not None and self.cache.evictable_pages >= short:
            self.cache.evict(short)
        return self.pages.allocate(count)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; what it drew stays, its rows are computed again."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.restart()
        self.ready.appendleft(sequence)
        self.preempted += 1

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.pages:
            if sequence.error is None:
                self.share_prefix(sequence, whole_pages=False)
            self.pages.release(sequence.pages)
        sequence.pages = []

    def _admit(self, now: float) -> list[Sequence]:
        """Sequences that may start, in order."""
        room = self.config.max_num_seqs - len(self.running)
        if room > 0 and all(map(self._waits_for_leader, self.ready)):
            self.ready.extend(self.admission.take(now, room, idle=not self.running))
        able = [s for s in self.ready if not self._waits_for_leader(s)]
        return sorted(able, key=self.policy.rank)[: max(0, room)]

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        return self.cache is not None and sequence.current and sequence.waits_for_leader

    def _start(self, sequence: Sequence, budget: int, works: list[Work]) -> Work | None:
        """First rows of a sequence, after what the prefix cache knows of it; None when there is no room yet."""
        if sequence.ahead:  # preempted while its next token is being drawn
            return None
        match = self._match(sequence)
        own, count = self._pages_to_start(sequence, match, budget, works)
        if own is None and match.source is not None:
            # The page to copy from is one more than the sequence itself needs; in a small pool it can be one too many.
            self.pages.release([match.source])
            match = Match(match.pages, match.length - match.rows)
            own, count = self._pages_to_start(sequence, match, budget, works)
        if own is None:
            self.pages.release(match.held)
            return None
        if match.source is not None:
            self._copies.append((match.source, own[0]))
        rows = match.length
        sequence.pages = [*match.pages, *own]
        sequence.planned = sequence.computed = rows
        sequence.inserted = rows
        if sequence.cached is None:
            sequence.cached = min(rows, sequence.prompt_len)
        return self._work(sequence, count, [])

    def _pages_to_start(
        self, sequence: Sequence, match: Match, budget: int, works: list[Work]
    ) -> tuple[list[int] | None, int]:
        """Pages behind the matched ones, None when there are too few, and how many rows go into the step."""
        wanted = sequence.length - match.length
        count = self.policy.share(wanted, budget, _rows(works), self.config.enable_chunked_prefill)
        # Pages for all of the prompt are asked for at once, so that prompts do not push each other out half read.
        need = -(-(sequence.length + self._draft_rows()) // self.config.page_size) - len(match.pages)
        return (self.take_pages(need) if count > 0 else None), count

    def _match(self, sequence: Sequence) -> Match:
        if (
            self.cache is None
            or not sequence.current
            or (sequence.params.prompt_logprobs is not None and not sequence.generated)
        ):
            return Match()
        # The last token is computed in any case: the next one is drawn from its hidden state.
        tokens = sequence.tokens if self.cache.lookahead else sequence.tokens[:-1]
        return self.cache.match(sequence.namespace, tokens)

    def _work(self, sequence: Sequence, count: int, drafts: list[int]) -> Work:
        start, end = sequence.planned, sequence.planned + count - len(drafts)
        ids = [*sequence.tokens[start:end], *drafts]
        ahead = end > len(sequence.tokens)
        if ahead:
            ids.insert(count - 1 - len(drafts), UNKNOWN)
        draws = 1 + len(drafts) if end == sequence.length else 0
        # Once something is drawn they are all there; a preempted sequence reads its prompt again without them.
        wanted = sequence.params.prompt_logprobs is not None and not sequence.generated
        wanted = wanted and start + 1 < sequence.prompt_len
        work = Work(sequence, start, ids, draws, list(drafts), ahead, sequence.epoch, wanted)
        sequence.planned += count
        sequence.ahead += bool(draws)
        return work

    def _group(self, works: list[Work]) -> Group:
        return make_group(works[0].sequence.view, works, self.config.page_size, self.device)


def _rows(works: list[Work]) -> int:
    return sum(work.count for work in works)
