"""Gradients of the whole model: against transformers' autograd, and of the indexer's own loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import random_ids, save_oracle

import glm5sdk
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.nn.token_batch import TokenBatch

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint. .* holds no tensor of the MTP layer")


@pytest.mark.parametrize("backend", ["reference", None])
def test_every_parameter_gradient(tmp_path: Path, backend: str | None) -> None:
    theirs = save_oracle(tmp_path, seed=3, indexer_types=["full", "shared", "full", "full"])
    ours = Glm5ForCausalLM.from_pretrained(tmp_path, latent_norm_eps=1e-6)
    ids, targets = random_ids(2, 31, seed=1), random_ids(2, 31, seed=2)
    logits = theirs(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).backward()
    with glm5sdk.use(backend) if backend else torch.enable_grad():
        (-ours.logprobs(ids, targets).mean()).backward()
    mine = dict(ours.named_parameters())
    compared = 0
    for name, p in theirs.named_parameters():
        if ".indexer." in name:
            assert mine[name].grad is None, "the language-model loss does not reach the indexer"
            continue
        got = mine[name].grad
        assert got is not None, name
        scale = p.grad.abs().max().clamp_min(1e-3)
        assert ((got - p.grad).abs().max() / scale) < 2e-3, name
        compared += 1
    assert compared > 40


def test_indexer_loss_trains_the_indexer_alone() -> None:
    torch.manual_seed(0)
    model = Glm5ForCausalLM(preset("tiny", num_hidden_layers=2, num_nextn_predict_layers=0))
    ids = random_ids(2, 40, seed=1)
    for selection in ("dense", "indexer"):
        model.selection = selection
        model.zero_grad(set_to_none=True)
        context = model.context(TokenBatch.packed([40, 40]), collect_kl=True)
        model.hidden_states(ids.reshape(-1), context)
        assert sorted(context.kl) == [0, 1]
        loss = sum(kl.mean() for kl in context.kl.values())
        assert 0 < loss.item() < float("inf")
        loss.backward()
        for name, p in model.named_parameters():
            assert (p.grad is not None) == (".indexer." in name), name


def test_indexer_loss_falls_when_trained() -> None:
    torch.manual_seed(0)
    model = Glm5ForCausalLM(preset("tiny", num_hidden_layers=2, num_nextn_predict_layers=0, initializer_range=0.1))
    model.selection = "dense"
    ids = random_ids(4, 32, seed=1).reshape(-1)
    indexer = [p for n, p in model.named_parameters() if ".indexer." in n]
    optimiser = torch.optim.Adam(indexer, lr=3e-3)
    losses = []
    for _ in range(25):
        context = model.context(TokenBatch.packed([32] * 4), collect_kl=True)
        model.hidden_states(ids, context)
        loss = sum(kl.mean() for kl in context.kl.values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
