"""Losses of each phase against plain formulas on logits; who is frozen; router balancing; measures on held-out text."""

from __future__ import annotations

import math

import pytest
import torch
from small_training import VOCABULARY, RandomBatches, small_model
from torch.nn.functional import cross_entropy

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.train import Phase
from glm5sdk.train.data import IGNORED, Batch
from glm5sdk.train.evaluate import accuracy, evaluate
from glm5sdk.train.recipe import balance_routers, compute_losses, freeze

DENSE, INDEXER, SPARSE = (Phase(kind, steps=1) for kind in ("dense", "indexer", "sparse"))


def trained_names(kind: str) -> set[str]:
    """Names of parameters that get a nonzero gradient in a phase."""
    model = small_model()
    freeze(model, kind)
    model.selection = "indexer" if kind == "sparse" else "dense"
    compute_losses(model, RandomBatches().batch(0), Phase(kind, steps=1), 0.3, 1.0).total.backward()
    return {n for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}


def test_each_phase_trains_its_own() -> None:
    names = {n for n, _ in small_model().named_parameters()}
    indexers = {n for n in names if ".indexer." in n}
    assert len({n.split(".")[2] for n in indexers}) == 3  # two layers and the MTP layer
    assert trained_names("indexer") == indexers
    assert trained_names("dense") == names - indexers
    assert trained_names("sparse") == names


def test_freezing_is_undone_by_the_next_phase() -> None:
    model = small_model()
    for kind in ("dense", "indexer", "sparse"):
        freeze(model, kind)
    assert all(p.requires_grad for p in model.parameters())


def test_no_indexer_no_indexer_phase() -> None:
    model = small_model(sparse_pattern="window_stride", sparse_window=4, sparse_stride=4, num_nextn_predict_layers=0)
    with pytest.raises(ContractError, match="needs 'indexer'"):
        freeze(model, "indexer")


def test_language_and_mtp_losses_are_cross_entropies_of_logits() -> None:
    model, batch = small_model(), RandomBatches(2, 12).batch(0)
    model.selection = "dense"
    targets = batch.targets.clone()
    targets[0, :5] = IGNORED
    losses = compute_losses(model, Batch(batch.ids, targets), DENSE, 0.5, 1.0)
    with torch.no_grad():
        logits = model(batch.ids)
        language = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        tokens = TokenBatch.packed([12, 12])
        hidden = model.hidden_states(batch.ids.flatten(), model.context(tokens))
        # The token after position i is the input at i + 1; what is to be predicted, the target at i + 1.
        next_ids = torch.cat([batch.ids[:, 1:], torch.zeros(2, 1, dtype=torch.long)], dim=1)
        draft = model.mtp_hidden_states(next_ids.flatten(), hidden, model.context(tokens))
        after = model.logits(draft).view(2, 12, VOCABULARY)[:, :-1]
        mtp = cross_entropy(after.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
    assert losses.language == pytest.approx(float(language), rel=1e-5)
    assert losses.mtp == pytest.approx(float(mtp), rel=1e-5)
    assert losses.kl == 0.0
    assert float(losses.total.detach()) == pytest.approx(float(language + 0.5 * mtp), rel=1e-5)


def test_sparse_phase_adds_the_indexers_loss() -> None:
    model, batch = small_model(), RandomBatches(1, 20).batch(0)
    losses = compute_losses(model, batch, SPARSE, 0.3, 2.0)
    assert losses.kl > 0
    total = losses.language + 0.3 * losses.mtp + 2.0 * losses.kl
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-5)


def test_warm_up_brings_the_indexer_to_the_attention() -> None:
    model, batch = small_model(), RandomBatches(2, 32).batch(0)
    freeze(model, "indexer")
    model.selection = "dense"
    with torch.no_grad():  # attention worth imitating: not flat
        for layer in model.model.layers:
            layer.self_attn.q_b_proj.weight.mul_(60)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    values = []
    for _ in range(30):
        losses = compute_losses(model, batch, INDEXER, 0.3, 1.0)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        values.append(losses.kl)
    assert losses.language == losses.mtp == 0.0
    assert values[-1] < 0.6 * values[0], values


def test_balancing_raises_the_bias_of_idle_experts() -> None:
    model = small_model()
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]], dtype=torch.int32)  # loads 4, 3, 1, 0; mean 2
    balance_routers(model, {1: ids}, 0.01)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    torch.testing.assert_close(bias, torch.tensor([-0.01, -0.01, 0.01, 0.01]))


def test_balancing_evens_out_the_load() -> None:
    model = small_model()
    model.selection = "dense"
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.5, 0.5, 0.0, 0.0]))
    batch = RandomBatches(4, 32).batch(0)

    def idle() -> float:
        with torch.no_grad():
            ids = compute_losses(model, batch, DENSE, 0.0, 0.0).experts[1]
        return float(torch.bincount(ids.flatten().long(), minlength=4).min()) / ids.numel()

    assert idle() == 0.0
    for _ in range(60):
        with torch.no_grad():
            balance_routers(model, compute_losses(model, batch, DENSE, 0.0, 0.0).experts, 0.01)
    assert idle() > 0.1


def test_bits_per_byte_by_hand() -> None:
    """A head of zeros gives ln V for every target; bytes count only targets that count."""
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    lengths = torch.zeros(VOCABULARY, dtype=torch.int64)
    lengths[5], lengths[6] = 3, 1
    ids = torch.zeros(1, 4, dtype=torch.int64)
    batch = Batch(ids, torch.tensor([[5, 6, 7, IGNORED]]))
    score = evaluate(model, [batch, batch], lengths, "dense")
    assert score.tokens == 6
    assert score.nats == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(3 * math.log2(VOCABULARY) / 4, rel=1e-6)
    assert model.selection == "indexer"


def test_accuracy_counts_hits() -> None:
    model, batch = small_model(), RandomBatches(1, 8).batch(0)
    with torch.no_grad():
        best = model(batch.ids).argmax(-1)
    targets = best.clone()
    targets[0, :2] = (targets[0, :2] + 1) % VOCABULARY
    targets[0, 2:4] = IGNORED
    assert accuracy(model, Batch(batch.ids, targets)) == pytest.approx(4 / 6)
