"""The training loop: phases one after the other over numbered batches, and a state that says where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.train.config import OptimizerConfig, Phase
from glm5sdk.train.data import Batch, Batches
from glm5sdk.train.optim import Optimizer
from glm5sdk.train.recipe import balance_routers, compute_losses, freeze
from glm5sdk.train.schedule import factor

__all__ = ["Record", "Trainer"]

_BAD_STEPS = 5  # updates in a row without a finite gradient before the run is given up


@dataclass(frozen=True)
class Record:
    """One step.

    Attributes:
        step: number of the step, from 1.
        phase: index of its phase.
        kind: of the phase.
        language, mtp, kl: losses in nats, see recipe.Losses.
        gradient: norm before clipping.
        lr: factor on the learning rates.
        tokens: of the batch.
        seconds: it took.
    """

    step: int
    phase: int
    kind: str
    language: float
    mtp: float
    kl: float
    gradient: float
    lr: float
    tokens: int
    seconds: float


class Trainer:
    """Trains a model through phases; every step's batch is a function of its number.

    Args:
        model: trained in place; its `selection` at this moment is the one of sparse phases.
        batches: see data.Batches.
        phases: see Phase.
        optimizer: see OptimizerConfig.
        mtp_weight, kl_weight, balance_rate: see TrainConfig.

    Attributes:
        step: finished steps.
        phase: index of the current phase, len(phases) when done.
        history: a Record for each finished step.
    """

    def __init__(
        self,
        model: Glm5ForCausalLM,
        batches: Batches,
        phases: Sequence[Phase],
        optimizer: OptimizerConfig | None = None,
        *,
        mtp_weight: float = 0.3,
        kl_weight: float = 1.0,
        balance_rate: float = 1e-3,
    ) -> None:
        self.model, self.batches, self.phases = model, batches, tuple(phases)
        self.optimizer = Optimizer(model, optimizer or OptimizerConfig())
        self.mtp_weight, self.kl_weight, self.balance_rate = mtp_weight, kl_weight, balance_rate
        self.step = self.phase = 0
        self.history: list[Record] = []
        self._selection = model.selection
        if callable(self._selection) and any(phase.kind == "indexer" for phase in phases):
            freeze(model, "indexer")  # refuses a model without indexers before anything is trained
        self._phase_steps, self._phase_seconds, self._bad = 0, 0.0, 0

    @property
    def done(self) -> bool:
        """Whether every phase has had its length."""
        return self.phase >= len(self.phases)

    def passed(self) -> float:
        """Fraction of the current phase that is over, seen from the middle of the coming step."""
        phase, steps = self.phases[self.phase], self._phase_steps
        if phase.steps is not None:
            return (steps + 0.5) / phase.steps
        assert phase.seconds is not None, "a phase has steps or seconds"
        half = 0.5 * self._phase_seconds / steps if steps else 0.0
        return (self._phase_seconds + half) / phase.seconds

    def run(self, on_step: Callable[[Record], None] | None = None) -> None:
        """Train until every phase is done.

        Args:
            on_step: called after each step; its time is not counted into a phase's seconds.
        """
        while not self.done:
            record = self.train_step()
            if on_step is not None:
                on_step(record)

    def train_step(self) -> Record:
        """One batch, one update.

        Raises:
            ContractError: all phases are over, or the batch does not fit the model.
            RuntimeError: the gradient was not finite five times in a row.
        """
        if self.done:
            raise ContractError(f"trainer: phase is {self.phase}, needs one of the {len(self.phases)} that there are")
        started = time.perf_counter()
        phase, lr = self.phases[self.phase], 0.0
        freeze(self.model, phase.kind)
        self.model.selection = self._selection if phase.kind == "sparse" else "dense"
        batch = self._batch()
        lr = factor(phase, self.passed())
        losses = compute_losses(self.model, batch, phase, self.mtp_weight, self.kl_weight)
        losses.total.backward()
        gradient = self.optimizer.step(lr)
        if phase.kind != "indexer" and self.balance_rate:
            balance_routers(self.model, losses.experts, self.balance_rate)
        self._count_bad(gradient)
        self.model.selection = self._selection
        self.step += 1
        record = Record(
            self.step, self.phase, phase.kind, losses.language, losses.mtp, losses.kl, gradient, lr,
            batch.ids.numel(), time.perf_counter() - started,
        )  # fmt: skip
        self.history.append(record)
        self._advance(phase, record.seconds)
        return record

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: optimiser, position in the data and the recipe, random state, history."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
            "phase": self.phase,
            "phase_steps": self._phase_steps,
            "phase_seconds": self._phase_seconds,
            "history": [asdict(record) for record in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; with the same weights the following losses are the same bits.

        Raises:
            CheckpointError: the state belongs to another kind of run.
        """
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            self.step, self.phase = int(state["step"]), int(state["phase"])
            self._phase_steps, self._phase_seconds = int(state["phase_steps"]), float(state["phase_seconds"])
            self.history = [Record(**record) for record in state["history"]]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"trainer: saved state lacks or has too much ({error}), needs this version's"
            ) from error

    def _batch(self) -> Batch:
        batch = self.batches.batch(self.step)
        limit = self.model.config.max_position_embeddings
        if batch.ids.shape[1] > limit:
            raise ContractError(
                f"trainer: sequence length is {batch.ids.shape[1]}, needs at most max_position_embeddings {limit}"
            )
        return Batch(batch.ids.to(self.model.device), batch.targets.to(self.model.device))

    def _count_bad(self, gradient: float) -> None:
        self._bad = 0 if gradient < float("inf") else self._bad + 1
        if self._bad >= _BAD_STEPS:
            raise RuntimeError(
                f"trainer: gradient was not finite {_BAD_STEPS} times in a row at step {self.step}; "
                "lower the learning rate, or start from an earlier checkpoint"
            )

    def _advance(self, phase: Phase, seconds: float) -> None:
        self._phase_steps += 1
        self._phase_seconds += seconds
        over = (
            self._phase_steps >= phase.steps
            if phase.steps is not None
            else self._phase_seconds >= (phase.seconds or 0.0)
        )
        if over:
            self.phase += 1
            self._phase_steps, self._phase_seconds = 0, 0.0
