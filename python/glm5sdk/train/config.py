"""What a training run is made of: phases, optimiser settings and the rest, checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.config import Glm5Config

__all__ = ["OptimizerConfig", "Phase", "TrainConfig", "glm5_phases"]

KINDS = ("dense", "indexer", "sparse")
SCHEDULES = ("cosine", "wsd")


def require(ok: bool, what: str, got: object, want: str) -> None:
    """Raise ContractError `train: <what> is <got>, needs <want>` unless `ok`."""
    if not ok:
        raise ContractError(f"train: {what} is {got!r}, needs {want}")


@dataclass(frozen=True)
class Phase:
    """One part of the recipe, ended by steps or by seconds.

    Attributes:
        kind: "dense" trains all but the indexers with attention over every key; "indexer" trains the indexers alone to
            imitate that attention; "sparse" trains everything with attention over the selected keys.
        steps, seconds: its length; exactly one is given. Only a length in steps makes runs repeatable to the bit.
        lr: factor on the optimiser's learning rates at the top of the schedule.
        schedule: "cosine" or "wsd" (warm-up, stable, decay).
        warmup: fraction of the phase in which the rate rises from 0.
        decay: fraction of the phase in which "wsd" falls, in a straight line, to `final`.
        final: factor on `lr` at the end.
    """

    kind: str
    steps: int | None = None
    seconds: float | None = None
    lr: float = 1.0
    schedule: str = "cosine"
    warmup: float = 0.05
    decay: float = 0.3
    final: float = 0.1

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "phase kind", self.kind, f"one of: {', '.join(KINDS)}")
        require((self.steps is None) != (self.seconds is None), "phase length", (self.steps, self.seconds),
                "steps or seconds, one of them")  # fmt: skip
        length = self.steps if self.seconds is None else self.seconds
        require(length is not None and length > 0, "phase length", length, "more than 0")
        require(self.schedule in SCHEDULES, "phase schedule", self.schedule, f"one of: {', '.join(SCHEDULES)}")
        require(self.lr > 0, "phase lr", self.lr, "a number > 0")
        require(0 <= self.warmup < 1, "phase warmup", self.warmup, "a fraction in [0, 1)")
        require(0 <= self.decay <= 1 - self.warmup, "phase decay", self.decay, "a fraction that leaves room for warmup")
        require(0 <= self.final <= 1, "phase final", self.final, "a fraction in [0, 1]")


@dataclass(frozen=True)
class OptimizerConfig:
    """Who updates what, and how fast.

    Attributes:
        name: "muon" (Muon for matrices, AdamW for embeddings, head, router, norms and biases) or "adamw" (for all).
        muon_lr: of matrices; an update has the root mean square that AdamW's typically has, so rates compare.
        adamw_lr: of everything else.
        momentum: of Muon, Nesterov.
        orthogonal_steps: Newton-Schulz iterations.
        split_heads: Muon Split: orthogonalise query, key and value up-projections head by head.
        betas, eps: of AdamW.
        weight_decay: decoupled; matrices and embeddings only.
        clip: largest norm of the gradient; 0 switches clipping off.
    """

    name: str = "muon"
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    momentum: float = 0.95
    orthogonal_steps: int = 5
    split_heads: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        require(self.name in ("muon", "adamw"), "optimizer", self.name, "muon or adamw")
        for what, rate in (("muon_lr", self.muon_lr), ("adamw_lr", self.adamw_lr)):
            require(rate > 0, what, rate, "a number > 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "a number in [0, 1)")
        require(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "numbers in [0, 1)")
        require(self.orthogonal_steps >= 1, "orthogonal_steps", self.orthogonal_steps, "at least 1")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "a number >= 0")
        require(self.clip >= 0, "clip", self.clip, "a number >= 0")


def glm5_phases(
    total: float, unit: str = "seconds", shares: tuple[float, float, float] = (0.74, 0.10, 0.16)
) -> tuple[Phase, ...]:
    """GLM-5's order at any size: dense training, indexer warm-up, sparse adaptation.

    Args:
        total: seconds or steps of the whole run.
        unit: "seconds" or "steps".
        shares: of the three phases.
    """
    require(unit in ("seconds", "steps"), "unit", unit, "seconds or steps")
    require(total > 0, f"total {unit}", total, "more than 0")

    def phase(kind: str, share: float, lr: float, schedule: str, warmup: float, decay: float, final: float) -> Phase:
        seconds, steps = (total * share, None) if unit == "seconds" else (None, max(1, round(total * share)))
        return Phase(kind, steps, seconds, lr, schedule, warmup, decay, final)

    return (
        # Falls over the end of the dense and all of the sparse phase as if they were one. Indexers have few steps and
        # nothing to unlearn: a rate that the model would not survive suits them.
        phase("dense", shares[0], 1.0, "wsd", 0.02, 0.6, 0.3),
        phase("indexer", shares[1], 5.0, "cosine", 0.05, 0.0, 0.1),
        phase("sparse", shares[2], 0.3, "wsd", 0.0, 1.0, 0.0),
    )


@dataclass(frozen=True)
class TrainConfig:
    """A whole run of `train`.

    Attributes:
        data: text files or folders of them.
        suffixes: which files of a folder count.
        out: folder for resumable checkpoints; None keeps nothing.
        model: a preset's name or a config. A tokenizer trained here sets its eos and pad ids.
        start: checkpoint folder to start from, with its config, weights and tokenizer, instead of a fresh model.
        resume: continue from the newest checkpoint in `out`, if there is one.
        phases: see Phase.
        optimizer: see OptimizerConfig.
        batch_size, seq_len: sequences a step, tokens a sequence.
        held_out: fraction of the files that is only evaluated.
        eval_sequences: held-out sequences that the figures are measured on.
        eval_every, save_every: steps between evaluations and checkpoints; 0 for the end only. The last checkpoint is
            always written.
        mtp_weight: of the multi-token-prediction loss (ignored without an MTP layer).
        kl_weight: of the indexers' loss in the sparse phase.
        balance_rate: step of the routers' bias towards equal load, as in loss-free balancing; 0 leaves it alone.
        seed: of weights and data order.
        threads: of torch; None leaves its setting.
        device: where it runs.
        progress: show a bar; None: on a terminal.
    """

    data: Sequence[str | PathLike[str]]
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    out: str | PathLike[str] | None = None
    model: str | Glm5Config = "tiny"
    start: str | PathLike[str] | None = None
    resume: bool = False
    phases: tuple[Phase, ...] = field(default_factory=lambda: glm5_phases(120.0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch_size: int = 8
    seq_len: int = 256
    held_out: float = 0.05
    eval_sequences: int = 128
    eval_every: int = 0
    save_every: int = 0
    mtp_weight: float = 0.3
    kl_weight: float = 1.0
    balance_rate: float = 1e-3
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    progress: bool | None = None

    def __post_init__(self) -> None:
        require(len(self.data) > 0, "data", self.data, "at least one file or folder")
        require(len(self.phases) > 0, "phases", self.phases, "at least one")
        for what in ("batch_size", "seq_len", "eval_sequences"):
            require(getattr(self, what) >= 1, what, getattr(self, what), "at least 1")
        for what in ("eval_every", "save_every", "mtp_weight", "kl_weight", "balance_rate"):
            require(getattr(self, what) >= 0, what, getattr(self, what), "a number >= 0")
        require(0 < self.held_out < 1, "held_out", self.held_out, "a fraction in (0, 1)")
        require(not self.resume or self.out is not None, "out", self.out, "the folder to resume from")
