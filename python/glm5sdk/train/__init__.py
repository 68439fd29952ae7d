"""Single-process training: data, tokenizer, Muon, GLM-5's recipe, the loop, checkpoints and plots."""

from __future__ import annotations

from glm5sdk.train.config import OptimizerConfig, Phase, TrainConfig, glm5_phases
from glm5sdk.train.run import TrainResult, train
from glm5sdk.train.trainer import Trainer

__all__ = ["OptimizerConfig", "Phase", "TrainConfig", "TrainResult", "Trainer", "glm5_phases", "train"]
