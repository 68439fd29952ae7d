"""The pair of optimisers: AdamW against its formula, clipping, refusal of gradients that are not finite."""

from __future__ import annotations

import pytest
import torch
from small_training import small_model
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.train import OptimizerConfig
from glm5sdk.train.optim import Optimizer


def give_gradients(model: torch.nn.Module, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_adamw_is_its_formula() -> None:
    model = small_model()
    config = OptimizerConfig(name="adamw", adamw_lr=1e-2, weight_decay=0.1, clip=0.0, betas=(0.9, 0.95))
    optimizer = Optimizer(model, config)
    want = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(v) for n, v in want.items()}
    second = {n: torch.zeros_like(v) for n, v in want.items()}
    for step in (1, 2, 3):
        grads = give_gradients(model, step)
        optimizer.step(0.5)
        for name, value in want.items():
            g = grads[name].double()
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            decay = 0.1 if value.dim() > 1 else 0.0
            value -= 5e-3 * decay * value
            value -= 5e-3 * (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), want[name], rtol=1e-5, atol=1e-6)


def test_muon_leaves_tables_and_vectors_to_adamw() -> None:
    """They move as under AdamW alone; matrices do not."""
    alone, pair = small_model(), small_model()
    for model, name in ((alone, "adamw"), (pair, "muon")):
        give_gradients(model, 1)
        Optimizer(model, OptimizerConfig(name=name)).step(1.0)
    for (name, a), b in zip(alone.named_parameters(), pair.parameters(), strict=True):
        table = name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")) or a.dim() == 1
        assert torch.equal(a, b) == table, name


def test_clips_the_norm_of_all_gradients_together() -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimizerConfig(name="adamw", clip=0.5, betas=(0.0, 0.0)))
    grads = give_gradients(model, 1)
    norm = sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5
    assert optimizer.step(1.0) == pytest.approx(norm, rel=1e-5)
    assert all(p.grad is None for p in model.parameters())
    # With betas 0 the second moment is the clipped gradient squared.
    state = optimizer.state_dict()["AdamW"]["state"]
    total = sum(float(s["exp_avg_sq"].double().sum()) for s in state.values()) ** 0.5
    assert total == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimizerConfig())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    give_gradients(model, 1)
    model.lm_head.weight.grad[0, 0] = bad  # type: ignore[index]
    assert not optimizer.step(1.0) < float("inf")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_refuses_the_state_of_another() -> None:
    muon, adamw = (Optimizer(small_model(), OptimizerConfig(name=n)) for n in ("muon", "adamw"))
    with pytest.raises(CheckpointError, match="saved state is of AdamW, needs"):
        muon.load_state_dict(adamw.state_dict())
    larger = Optimizer(small_model(num_hidden_layers=3), OptimizerConfig())
    with pytest.raises(CheckpointError, match="another model"):
        muon.load_state_dict(larger.state_dict())
