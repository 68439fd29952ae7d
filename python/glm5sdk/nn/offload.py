"""Experts that stay on disk: a few slots of memory a layer, filled as the router chooses; the bits stay the same.

A step that needs more experts than there are slots runs in waves. Reads happen in a background thread; what it has read
too early, too late or not at all costs time and never changes a result.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.nn.moe import Experts, Router
from glm5sdk.nn.routed import Part, routed_rows, run_part
from glm5sdk.registry.weight import Weight, WeightLike

__all__ = ["ExpertSource", "OffloadStats", "OffloadedExperts", "Reader"]


class ExpertSource(Protocol):
    """Where the weights of a layer's experts come from.

    Attributes:
        experts: E.
    """

    experts: int

    def empty(self, slots: int, dtype: torch.dtype, device: torch.device) -> tuple[WeightLike, WeightLike]:
        """Memory for `slots` experts: gate-up [S, 2I, N] and down [S, N, I]."""
        ...

    def read(self, expert: int, slot: int, gate_up: WeightLike, down: WeightLike) -> int:
        """Fill one slot; called from the reader's thread.

        Returns:
            Bytes read.

        Raises:
            CheckpointError: the data is gone or damaged; names tensor and file.
        """
        ...


# An expert of a source, which is compared by identity.
_Key = tuple[ExpertSource, int]


@dataclass
class OffloadStats:
    """Totals since the start.

    Attributes:
        hits: experts that a step needed and found in a slot, or already on their way there.
        misses: experts that had to be read when a step needed them.
        hinted: reads begun on a guess.
        failed: reads that raised.
        bytes_read: from the source.
    """

    hits: int = 0
    misses: int = 0
    hinted: int = 0
    failed: int = 0
    bytes_read: int = 0


class Reader:
    """One background thread that all layers of a model share."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="expert-reader")

    def submit(self, work: Callable[[], int]) -> Future[int]:
        """Queue a read."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Drop what is queued and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class OffloadedExperts(Experts):
    """`Experts` whose weights live in a source, S of them in memory, least recently used ones giving way.

    Slots remember whose experts they hold, so that a `WeightView` may exchange the source for a forward pass.

    Args:
        source: of all experts.
        slots: S, at least 1.
        limit: clamp before SwiGLU, or None.
        dtype, device: of float slots. A cast or move of the model empties the slots and makes new ones.
        reader: shared by the layers of a model.
    """

    whole = False

    def __init__(
        self,
        source: ExpertSource,
        slots: int,
        limit: float | None,
        dtype: torch.dtype,
        device: torch.device | str,
        reader: Reader,
    ) -> None:
        nn.Module.__init__(self)
        if slots < 1:
            raise CapacityError(f"offload: slots is {slots}, needs at least 1 expert a layer in memory")
        self.limit, self.slots, self.stats = limit, min(slots, source.experts), OffloadStats()
        self.following: tuple[Router, OffloadedExperts] | None = None  # where guesses about the next layer go
        self.source, self._reader, self._lock = source, reader, threading.RLock()
        self._make_slots(dtype, torch.device(device))

    @property
    def count(self) -> int:
        return self.source.experts

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(t.nbytes for w in self._memory for t in (w.tensors if isinstance(w, Weight) else (w,)))

    def weights_like(self) -> tuple[WeightLike, WeightLike]:
        return self._memory

    def expect(self, x_TN: Tensor, ids_TA: Tensor) -> None:
        """Begin to read what the router chose, then what the next layer's router would choose from the same input."""
        with self._lock:
            for expert in [e for e, read in self._coming.items() if read.done()]:
                self._settle(expert)  # a guess that failed is asked for again if it is needed
            wanted = self._wanted(ids_TA)
            for expert in wanted:
                if expert in self._slot_of:
                    self.stats.hits += 1
                    self._slot_of.move_to_end(expert)
                else:
                    self.stats.misses += 1
                    self._begin(expert, keep=wanted)
            self._counted = wanted
        if self.following is not None and x_TN.shape[0]:
            router, experts = self.following
            with torch.no_grad():
                experts.hint(router(x_TN)[0])

    def hint(self, ids_TA: Tensor) -> None:
        """Begin to read experts that may be needed soon, where that costs no other one that is wanted as well."""
        with self._lock:
            wanted = self._wanted(ids_TA)
            if len(wanted) > self.slots:
                return
            for expert in wanted:
                if expert not in self._slot_of and self._begin(expert, keep=wanted):
                    self.stats.hinted += 1

    def forward(self, x_TN: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """As `Experts`.

        Raises:
            CheckpointError: an expert could not be read; the next call tries again.
            ContractError: an adapter for experts is active.
        """
        if self.adapter is not None:
            raise ContractError(
                "offload: an adapter adds to experts, needs them in memory; merge it into the checkpoint"
            )
        with self._lock:
            return routed_rows(x_TN, ids_TA, weights_TA, self.count, self._run_waves)

    def _run_waves(self, rows: Tensor, owners: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        if self.patch is not None:
            place = self.patch.place(self.count, rows.device)
            run_part(rows, owners, Part(place, self.patch.gate_up, self.patch.down), self.limit, out)
            owners = torch.where(place[owners.clamp(min=0).long()] >= 0, -1, owners)
        todo = self._wanted(owners, patched=False)
        self.stats.misses += sum(e not in self._slot_of and e not in self._counted for e in todo)
        self._counted = []
        while todo:
            for expert in todo:
                if expert not in self._slot_of and not self._begin(expert, keep=todo):
                    break
            ready = [e for e in todo if e in self._slot_of and not self._is_coming(e)]
            if not ready:
                coming = [e for e in todo if e in self._slot_of]
                if not coming:  # every slot is being filled on a guess
                    self._settle(next(iter(self._coming)))
                    continue
                ready = coming[:1]
                self._arrive(ready[0])
            place = torch.full((self.count,), -1, dtype=torch.int64)
            place[[e for _, e in ready]] = torch.tensor([self._slot_of[key] for key in ready])
            run_part(rows, owners, Part(place.to(rows.device), *self._memory), self.limit, out)
            for expert in ready:
                self._slot_of.move_to_end(expert)
            todo = [e for e in todo if e not in ready]
        return out

    def _wanted(self, ids: Tensor, patched: bool = True) -> list[_Key]:
        found = ids.unique().tolist()
        skip = set(self.patch.ids) if patched and self.patch is not None else set()
        return [(self.source, e) for e in found if e >= 0 and e not in skip]

    def _is_coming(self, expert: _Key) -> bool:
        """Whether its read has not ended; an ended one is taken in, or its error raised."""
        if expert in self._coming and self._coming[expert].done():
            self._arrive(expert)
        return expert in self._coming

    def _settle(self, expert: _Key) -> BaseException | None:
        """Wait for a read that was begun and take it in; its error, if it has one, leaves the slot free."""
        coming = self._coming.pop(expert)
        error = CancelledError() if coming.cancelled() else coming.exception()
        if error is None:
            self.stats.bytes_read += coming.result()
        else:
            self.stats.failed += not isinstance(error, CancelledError)
            self._free.append(self._slot_of.pop(expert))
        return error

    def _arrive(self, expert: _Key) -> None:
        """Wait for a read that this step needs."""
        if expert in self._coming and (error := self._settle(expert)) is not None:
            raise error

    def _begin(self, expert: _Key, keep: Sequence[_Key]) -> bool:
        """Queue a read into a free slot or that of the least recently used expert outside of `keep`; False if none."""
        if not self._free and not self._evict(keep):
            return False
        slot = self._free.pop()
        self._slot_of[expert] = slot
        source, number = expert
        memory = self._memory
        self._coming[expert] = self._reader.submit(lambda: source.read(number, slot, *memory))
        return True

    def _evict(self, keep: Sequence[_Key]) -> bool:
        kept = set(keep)
        for expert in self._slot_of:
            if expert in kept:
                continue
            coming = self._coming.get(expert)
            if coming is not None:
                if not coming.cancel() and not coming.done():
                    continue  # being written at this moment
                if self._settle(expert) is not None:
                    return True
            self._free.append(self._slot_of.pop(expert))
            return True
        return False

    def _make_slots(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._memory = self.source.empty(self.slots, dtype, device)
        self._slot_of: OrderedDict[_Key, int] = OrderedDict()  # least recently used first
        self._coming: dict[_Key, Future[int]] = {}
        self._free = list(range(self.slots))[::-1]
        self._counted: list[_Key] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadedExperts:
        with self._lock:
            moved = fn(torch.empty(0, dtype=self._dtype, device=self._device))
            if (moved.dtype, moved.device) != (self._dtype, self._device):
                for expert in list(self._coming):
                    self._coming.pop(expert).cancel()  # one under way writes to the old memory, which it holds
                self._make_slots(moved.dtype, moved.device)
        return self
