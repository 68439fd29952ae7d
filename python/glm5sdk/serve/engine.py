"""Engine: requests in, steps, deltas out. Synchronous and single-threaded; `LLM` and `AsyncEngine` drive it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from glm5sdk.core.errors import ContractError
from glm5sdk.core.log import get_logger
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.serve.admission import AdmissionPolicy, FirstCome
from glm5sdk.serve.advance import advance
from glm5sdk.serve.capacity import longest_sequence, make_pools
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.control import Control
from glm5sdk.serve.drafter import Drafter
from glm5sdk.serve.emission import emit
from glm5sdk.serve.executor import InlineExecutor, ThreadExecutor
from glm5sdk.serve.guidance import Guide
from glm5sdk.serve.intake import Intake
from glm5sdk.serve.interface import EngineInfo, EngineStats, OverloadedError
from glm5sdk.serve.leases import Leases
from glm5sdk.serve.lockstep import Lockstep
from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.pages import PagePool
from glm5sdk.serve.params import SamplingParams
from glm5sdk.serve.policy import DecodeFirst, SchedulingPolicy
from glm5sdk.serve.prefix_cache import RadixCache
from glm5sdk.serve.prefix_transfer import PrefixTransfer
from glm5sdk.serve.runner import ModelRunner
from glm5sdk.serve.scheduler import Scheduler
from glm5sdk.serve.sequence import Sequence
from glm5sdk.serve.step import Drawn, Step
from glm5sdk.serve.weights import Weights

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM
    from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["Engine"]

_log = get_logger("serve")
IDLE_SECONDS = 0.01  # between two looks at a queue that cannot move


class Engine:
    """Continuous batching over a paged cache.

    `add` requests, call `step` until nothing is left, read the deltas. What a request gets depends on its prompt, its
    parameters and its weights alone: not on the batch, the chunks, the pages, the prefix cache, preemption or drafts.

    Args:
        model: in eval mode; the engine is the only one to run it.
        tokenizer: for text and stop strings; None gives token ids alone.
        config: sizes and switches.
        admission: the queue; by default first come, first served within a priority.
        policy: the scheduler's choices.
        lockstep: the other processes over which the model's experts are spread; `step` then has to be called all the
            time, by every process.
        clock: seconds, monotonic.

    Raises:
        ContractError: the config does not fit the model.
        CapacityError: the cache does not fit into memory.
    """

    def __init__(
        self,
        model: Glm5ForCausalLM,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        admission: AdmissionPolicy | None = None,
        policy: SchedulingPolicy | None = None,
        lockstep: Lockstep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.tokenizer, self.clock = model.eval(), tokenizer, clock
        self.config = c = config or EngineConfig()
        self.max_model_len = longest_sequence(model, c)
        speculates = c.speculative_tokens > 0
        self.pools = make_pools(model, c)
        self.pages = PagePool(self.pools.num_pages)
        cache = RadixCache(self.pages, c.page_size, lookahead=int(speculates)) if c.enable_prefix_caching else None
        drafter = None
        if speculates:
            share = c.share_draft_indices
            share = model.config.index_share_for_mtp_iteration if share is None else share
            rejection = c.speculative_method == "rejection"
            drafter = Drafter(model, self.pools, c.speculative_tokens, share, lockstep is not None, rejection)
        self.runner = ModelRunner(model, self.pools, drafter, lockstep)
        self.weights = Weights(model, c.weight_version or "default")
        self.runner.installed = self.weights.base
        admission = FirstCome() if admission is None else admission  # an empty queue is false
        self.scheduler = Scheduler(c, self.pages, cache, admission, policy or DecodeFirst(), model.device)
        self._executor = ThreadExecutor(self.runner.run) if c.async_scheduling else InlineExecutor(self.runner.run)
        self._flying: tuple[Step, Future[list[Drawn]]] | None = None
        self._alive: dict[str, list[Sequence]] = {}
        self._news: dict[Sequence, None] = {}  # sequences that gained something or ended, in order
        self._deltas: list[Delta] = []
        self._totals = EngineStats()
        self._paused = False
        self._rows_per_second = 0.0
        self._step_ended = 0.0
        self.leases = Leases(self.pages, clock)
        self.transfer = PrefixTransfer(self)
        self.stop_ids = frozenset(model.config.eos_token_id) | frozenset(tokenizer.stop_ids if tokenizer else ())
        self.intake = Intake(c, model.config.vocab_size, self.max_model_len, self.pages.total, self.stop_ids, tokenizer)
        self.lockstep = lockstep
        self.control = Control(self)

    @property
    def weight_version(self) -> str:
        """Of the weights that new requests get, adapters aside."""
        return self.weights.version

    @property
    def info(self) -> EngineInfo:
        """What does not change while it lives."""
        c = self.config
        return EngineInfo(
            max_model_len=self.max_model_len,
            vocab_size=self.model.config.vocab_size,
            page_size=c.page_size,
            num_pages=self.pages.total,
            stop_token_ids=tuple(sorted(self.stop_ids)),
            max_num_seqs=c.max_num_seqs,
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            kv_cache_dtype=c.kv_cache_dtype,
            speculative_tokens=c.speculative_tokens,
        )

    def add(
        self,
        request_id: str,
        prompt_token_ids: Many[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        guide: Guide | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among the requests alive.
            prompt_token_ids: at least one token.
            params: how to continue it.
            priority: lower goes first.
            cache_salt: prefixes are shared under equal salts only.
            adapter: name of a loaded adapter.
            guide: `intake.guide(params)`, where that was called before; it may take a second.

        Raises:
            ContractError, CapacityError: it can never run. OverloadedError: the queue is full. Nothing was queued.
        """
        if request_id in self._alive:
            raise ContractError(f"engine: request_id is {request_id!r}, needs one that no request alive has")
        tokens = self.intake.check(prompt_token_ids, params)
        view = self.weights.view(adapter)
        self._check_queue(len(tokens), params.n)
        guide = guide or self.intake.guide(params)
        now = self.clock()
        sequences = self.intake.sequences(
            request_id, tokens, params, priority=priority, namespace=self.namespace(cache_salt, adapter), now=now,
            view=view, guide=guide,
        )  # fmt: skip
        for done, sequence in enumerate(sequences):
            try:
                self.scheduler.add(sequence, now)
            except OverloadedError:
                for queued in sequences[:done]:
                    self.scheduler.remove(queued)
                self._totals.rejected += 1
                raise
        self._alive[request_id] = sequences

    def abort(self, request_id: str) -> bool:
        """End a request now: its pages are free when this returns. False when there is none of that name."""
        sequences = self._alive.get(request_id)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.finished:
                self._emit(sequence)  # it may have ended in a step that was drained, and nobody has heard of it
            else:
                sequence.finish("abort")
                self.scheduler.remove(sequence)
                self._deltas.append(sequence.delta(finish_reason="abort"))
        del self._alive[request_id]
        self._totals.aborted += 1
        return True

    def has_work(self) -> bool:
        """Whether a call of `step` may do or report something, or others wait for it to take part in theirs."""
        return bool(self._alive or self._flying or self._deltas or self.lockstep)

    def knows(self, request_id: str) -> bool:
        """Whether a request is alive: its last delta has not been handed out."""
        return request_id in self._alive or any(d.request_id == request_id for d in self._deltas)

    def wait(self) -> None:
        """Sleep, when nothing runs, until the queue may let something through."""
        if self._flying is None:
            deadline = self.scheduler.admission.next_deadline(self.clock())
            rest = IDLE_SECONDS if deadline is None else deadline - self.clock()
            time.sleep(min(max(rest, 0.0), IDLE_SECONDS))

    def step(self) -> list[Delta]:
        """Finish one step, begin the next, and return what sequences gained.

        With async scheduling the next step is begun before the last one's draws are looked at; where that is not
        possible (drafts, penalties, grammars), before their text is made.

        Returns:
            Deltas; empty when nothing could run now.
        """
        if self._flying is None:
            self._begin(ahead=False)
        flying, self._flying = self._flying, None
        if flying is not None:
            if self._may_run_ahead():
                self._begin(ahead=True)
            self._finish(*flying)
            if self._flying is None and self.config.async_scheduling:
                self._begin(ahead=False)
        news, self._news = self._news, {}  # not all that are alive: thousands may wait
        for sequence in news:
            self._emit(sequence)
        for request_id in {sequence.request_id for sequence in news if sequence.finished}:
            sequences = self._alive.get(request_id, [])
            if sequences and all(sequence.finished for sequence in sequences):
                del self._alive[request_id]
                self._totals.finished += not any(sequence.error for sequence in sequences)
        deltas, self._deltas = self._deltas, []
        return deltas

    def drain(self) -> None:
        """Wait for the step in flight, so that weights, pages and tables may change. Its draws are kept."""
        if self._flying is not None:
            flying, self._flying = self._flying, None
            self._finish(*flying)

    def stats(self) -> EngineStats:
        """Numbers of this moment."""
        s, cache = self.scheduler, self.scheduler.cache
        cached = cache.evictable_pages if cache is not None else 0
        return replace(
            self._totals, running=len(s.running), waiting=s.waiting(), waiting_tokens=s.waiting_tokens(),
            pages_total=self.pages.total, pages_free=self.pages.free + cached, pages_cached=cached,
            preempted=s.preempted, weight_version=self.weight_version, extra={},
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether `step` should be called again at once: a step is in flight, deltas are ready, or others may wait."""
        return self._flying is not None or bool(self._deltas) or self.lockstep is not None

    def namespace(self, cache_salt: str, adapter: str | None = None) -> str:
        """Under which prefixes of requests with this salt and adapter are cached."""
        return json.dumps([cache_salt, adapter])

    def pause(self) -> None:
        """Begin no more steps; requests stay where they are and new ones are queued."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def flush_cache(self) -> None:
        """Forget all cached prefixes; requests alive keep their pages, and leave nothing behind."""
        if self.scheduler.cache is not None:
            self.scheduler.cache.flush()
        for sequences in self._alive.values():
            for sequence in sequences:
                sequence.current = False

    def flush_namespace(self, adapter: str) -> None:
        """Forget prefixes cached under an adapter, whatever their salt."""
        if self.scheduler.cache is not None:
            for name in self.scheduler.cache.namespaces():
                if json.loads(name)[1] == adapter:
                    self.scheduler.cache.flush(name)
        for sequences in self._alive.values():
            for sequence in sequences:
                sequence.current &= json.loads(sequence.namespace)[1] != adapter

    def set_weights(self, view: WeightView) -> str:
        """Give new requests other weights; those alive keep theirs. No step may be in flight. The new version."""
        self.weights.replace_base(view)
        self.runner.installed = self.weights.base
        self.flush_cache()
        return self.weight_version

    def close(self) -> None:
        """Abort what is left and end the engine's thread; spread over processes, wait for the others to close too."""
        for request_id in list(self._alive):
            self.abort(request_id)
        self.drain()
        if self.lockstep is not None:  # its experts are needed until all processes want to end
            self.lockstep.closing = True
            while not self.lockstep.ended:
                self._executor.submit(Step([])).result()
        self._executor.close()

    def _begin(self, ahead: bool) -> None:
        step = None if self._paused else self.scheduler.plan(self.clock(), ahead)
        if step is None and self.lockstep is not None:
            step = Step([])
        if step is not None:
            self._flying = step, self._executor.submit(step)

    def _may_run_ahead(self) -> bool:
        return self.config.async_scheduling and not self.config.speculative_tokens

    def _finish(self, step: Step, future: Future[list[Drawn]]) -> None:
        """Take in what a step computed."""
        try:
            results = future.result()
        except Exception as error:
            _log.exception("a step failed; its requests end with an error")
            if self.lockstep is not None:
                raise  # the others wait in a collective that this process has left: the group must start anew
            for work in step.works:
                self._fail(work.sequence, f"{type(error).__name__}: {error}")
            self.scheduler.settle(step)
            return
        self.scheduler.settle(step)
        self._totals.steps += bool(step.groups)
        self._measure(step)
        for work, drawn in zip(step.works, results, strict=True):
            sequence = work.sequence
            if sequence.finished:  # aborted, or failed, since the step was planned
                sequence.ahead -= bool(work.draws)
                continue
            advance(work, drawn)
            self._news[sequence] = None
            self._totals.drafted_tokens += drawn.proposed
            self._totals.accepted_tokens += max(0, len(drawn.tokens) - 1)
            if sequence.finished:
                self.scheduler.remove(sequence)
                if sequence.error is not None:
                    self._deltas.append(sequence.delta(finish_reason="error", error=sequence.error))
            elif drawn.tokens and sequence.generated == len(drawn.tokens):
                self.scheduler.share_prefix(sequence, whole_pages=True)

    def _measure(self, step: Step) -> None:
        now = self.clock()
        seconds, self._step_ended = now - max(self._step_ended, step.planned_at), now
        if seconds > 0 and step.groups:
            pace = sum(work.count for work in step.works) / seconds
            self._rows_per_second += (pace - self._rows_per_second) * (0.1 if self._rows_per_second else 1.0)

    def _emit(self, sequence: Sequence) -> None:
        was_finished, first = sequence.finished, sequence.emitted == sequence.prompt_len
        delta = emit(sequence)
        if delta is None:
            return
        if sequence.finished and not was_finished:
            self.scheduler.remove(sequence)
        if first:
            self._totals.prompt_tokens += sequence.prompt_len
            self._totals.cached_tokens += sequence.cached or 0
        self._totals.generated_tokens += len(delta.token_ids)
        self._deltas.append(delta)

    def _check_queue(self, tokens: int, count: int) -> None:
        """Whether so many more sequences may wait.

        Raises:
            OverloadedError: they may not.
        """
        c, s = self.config, self.scheduler
        for name, limit, value in (
            ("max_queued_requests", c.max_queued_requests, s.waiting() + count),
            ("max_queued_tokens", c.max_queued_tokens, s.waiting_tokens() + tokens * count),
        ):
            if limit is not None and value > limit and s.waiting():
                self._totals.rejected += 1
                raise OverloadedError(
                    f"engine: {name} would be {value}, needs at most {limit}; try again later", self._retry_after()
                )

    def _retry_after(self) -> float:
        """Seconds in which what waits now should have been read, at the pace of late; 1 to 60."""
        pace = self._rows_per_second
        return min(60.0, max(1.0, self.scheduler.waiting_tokens() / pace)) if pace else 1.0

    def _fail(self, sequence: Sequence, message: str) -> None:
        if not sequence.finished:
            sequence.finish("error", error=message)
            self._news[sequence] = None
            self.scheduler.remove(sequence)
            self._deltas.append(sequence.delta(finish_reason="error", error=message))
