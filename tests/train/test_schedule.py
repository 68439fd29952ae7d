"""Learning-rate schedules at points that can be worked out by hand; phases that make no sense are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from glm5sdk.core.errors import ContractError
from glm5sdk.train import OptimizerConfig, Phase, TrainConfig, glm5_phases
from glm5sdk.train.schedule import factor


def test_cosine() -> None:
    phase = Phase("dense", steps=10, lr=2.0, schedule="cosine", warmup=0.2, final=0.1)
    assert factor(phase, 0.0) == 0.0
    assert factor(phase, 0.1) == pytest.approx(1.0)
    assert factor(phase, 0.2) == pytest.approx(2.0)
    assert factor(phase, 0.6) == pytest.approx(2.0 * (1 - 0.5 * 0.9))
    assert factor(phase, 1.0) == pytest.approx(0.2)


def test_warmup_stable_decay() -> None:
    phase = Phase("dense", seconds=5.0, schedule="wsd", warmup=0.1, decay=0.4, final=0.0)
    assert [round(factor(phase, x), 6) for x in (0.05, 0.1, 0.5, 0.6, 0.8, 1.0, 7.0)] == [0.5, 1, 1, 1, 0.5, 0, 0]
    flat = Phase("sparse", steps=1, schedule="wsd", warmup=0.0, decay=0.0, final=0.5)
    assert [factor(flat, x) for x in (-1.0, 0.0, 0.99, 1.0)] == [1, 1, 1, 0.5]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_falls_steadily_after_the_warmup(schedule: str) -> None:
    phase = Phase("dense", steps=1, schedule=schedule, warmup=0.1, decay=0.5, final=0.2)
    values = [factor(phase, 0.1 + 0.9 * i / 100) for i in range(101)]
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.2)


def test_glm5_phases_share_the_total() -> None:
    phases = glm5_phases(100.0)
    assert [p.kind for p in phases] == ["dense", "indexer", "sparse"]
    assert sum(p.seconds or 0 for p in phases) == pytest.approx(100.0)
    assert sum(p.steps or 0 for p in glm5_phases(200, "steps")) == 200
    assert all((p.steps or 0) >= 1 for p in glm5_phases(1, "steps"))


@pytest.mark.parametrize(
    "values, word",
    [
        ({"kind": "dance", "steps": 1}, "kind is 'dance'"),
        ({"kind": "dense"}, "needs steps or seconds"),
        ({"kind": "dense", "steps": 1, "seconds": 1.0}, "needs steps or seconds"),
        ({"kind": "dense", "steps": 0}, "more than 0"),
        ({"kind": "dense", "seconds": float("nan")}, "more than 0"),
        ({"kind": "dense", "steps": 1, "schedule": "step"}, "cosine, wsd"),
        ({"kind": "dense", "steps": 1, "warmup": 0.8, "decay": 0.5}, "room for warmup"),
        ({"kind": "dense", "steps": 1, "final": 2}, "fraction"),
        ({"kind": "dense", "steps": 1, "lr": 0}, "number > 0"),
    ],
)
def test_refuses_a_phase(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ContractError, match=word):
        Phase(**values)


@pytest.mark.parametrize(
    "values, word",
    [
        ({"data": ()}, "data"),
        ({"data": ["x"], "phases": ()}, "phases"),
        ({"data": ["x"], "batch_size": 0}, "batch_size is 0"),
        ({"data": ["x"], "held_out": 1.0}, "held_out"),
        ({"data": ["x"], "resume": True}, "resume"),
        ({"data": ["x"], "balance_rate": -1}, "balance_rate"),
    ],
)
def test_refuses_a_run(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ContractError, match=word):
        TrainConfig(**values)


@pytest.mark.parametrize(
    "values", [{"name": "sgd"}, {"muon_lr": 0}, {"momentum": 1.0}, {"betas": (0.9, 1.0)}, {"clip": -1}]
)
def test_refuses_an_optimizer(values: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="train: "):
        OptimizerConfig(**values)
