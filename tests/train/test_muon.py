"""Muon against explicit loops over matrices, and the partition of GLM-5's parameters."""

from __future__ import annotations

import pytest
import torch
from small_training import small_config, small_model
from torch import Tensor, nn

from glm5sdk.train.muon import Muon, Partition, orthogonalise
from glm5sdk.train.optim import partition


def polar(x: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, by singular value decomposition in float64."""
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ v


def loop_newton_schulz(x: Tensor, steps: int) -> Tensor:
    """One matrix, written out, in float64; tall ones are transposed as Muon's authors do."""
    x = x.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


@pytest.mark.parametrize("shape", [(3, 5), (8, 8), (1, 4), (16, 40)])
def test_orthogonalise(shape: tuple[int, int]) -> None:
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    y = orthogonalise(x)
    values = torch.linalg.svdvals(y)
    assert bool((values > 0.5).all())
    assert bool((values < 1.3).all())
    for one, result in zip(x, y, strict=True):
        # The same singular vectors, so nearly the polar factor.
        assert float((result.double() * polar(one)).sum() / (result.norm() * polar(one).norm())) > 0.97
    assert torch.equal(orthogonalise(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def test_scale_does_not_matter() -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(orthogonalise(x * 1e-3), orthogonalise(x * 1e3), rtol=1e-3, atol=1e-4)


def test_muon_split_against_a_loop_over_heads() -> None:
    """kv_b_proj: of each head the key rows and the value rows apart; two steps with momentum and weight decay."""
    heads, nope, value, latent = 3, 4, 6, 5
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(heads * (nope + value), latent, generator=generator)
    grads = [torch.randn(start.shape, generator=generator) for _ in range(2)]
    parameter = nn.Parameter(start.clone())
    optimizer = Muon([(parameter, Partition(heads, (nope, value)))], lr=0.1, momentum=0.9, weight_decay=0.01)
    want, mean = start.double(), torch.zeros(start.shape, dtype=torch.float64)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
        mean = 0.9 * mean + 0.1 * grad.double()
        update = 0.1 * grad.double() + 0.9 * mean
        want = want * (1 - 0.1 * 0.01)
        for head in range(heads):
            for first, size in ((0, nope), (nope, value)):
                rows = slice(head * (nope + value) + first, head * (nope + value) + first + size)
                scale = 0.2 * max(size, latent) ** 0.5
                want[rows] -= 0.1 * scale * loop_newton_schulz(update[rows], 5)
    torch.testing.assert_close(parameter.detach().double(), want, rtol=1e-4, atol=1e-5)


def test_experts_one_by_one_in_one_batch_with_others() -> None:
    """Equal shapes of different parameters share a batch and do not mix."""
    generator = torch.Generator().manual_seed(4)
    experts = nn.Parameter(torch.zeros(3, 8, 6))
    plain = nn.Parameter(torch.zeros(4, 6))
    experts.grad, plain.grad = (torch.randn(p.shape, generator=generator) for p in (experts, plain))
    Muon([(experts, Partition(3, (4, 4))), (plain, Partition(1, (4,)))], lr=1.0, momentum=0.0).step()
    scale = 0.2 * 6**0.5
    for got, grad in [
        *((experts[e, half], experts.grad[e, half]) for e in range(3) for half in (slice(0, 4), slice(4, 8))),
        (plain, plain.grad),
    ]:
        torch.testing.assert_close(got.detach().double(), -scale * loop_newton_schulz(grad, 5), rtol=1e-4, atol=1e-5)


def test_no_gradient_no_change() -> None:
    frozen, moved = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([(frozen, Partition(1, (2,))), (moved, Partition(1, (2,)))], lr=0.1, weight_decay=0.5)
    moved.grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2, 3))
    assert not torch.equal(moved, torch.ones(2, 3))
    assert frozen not in optimizer.state


def test_partition_of_every_parameter() -> None:
    config, model = small_config(), small_model()
    found = {name: partition(name, p, config) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        how = found[name]
        table = name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))
        assert (how is None) == (table or parameter.dim() == 1), name
        if how is not None:
            assert how.count * sum(how.sizes) * parameter.shape[-1] == parameter.numel(), name
    assert found["model.layers.0.self_attn.q_b_proj.weight"] == Partition(2, (10,))
    assert found["model.layers.0.self_attn.kv_b_proj.weight"] == Partition(2, (6, 8))
    assert found["model.layers.1.mlp.experts.gate_up_proj"] == Partition(4, (8, 8))
    assert found["model.layers.1.mlp.experts.down_proj"] == Partition(4, (16,))
    name = "model.layers.0.self_attn.q_b_proj.weight"
    assert partition(name, model.get_parameter(name), config, split_heads=False) == Partition(1, (20,))
