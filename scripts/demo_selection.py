"""Part two: copying random tokens needs one exact key out of many, so who selects the keys decides everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM
from glm5sdk.nn.context import Selection
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.train import OptimizerConfig, Phase, Trainer
from glm5sdk.train.data import IGNORED, Batch
from glm5sdk.train.evaluate import accuracy
from glm5sdk.train.plot import BLUE, new_figure, save_figure
from glm5sdk.train.progress import Progress

LENGTH, TOPK, VOCABULARY = 48, 8, 64
NOWHERE = 2**30


class Copies:
    """Random tokens, a separator, and the same tokens again, which alone are to be predicted."""

    def __init__(self, seed: int, batch_size: int) -> None:
        self.seed, self.batch_size = seed, batch_size

    def batch(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        tokens = torch.randint(1, VOCABULARY, (self.batch_size, LENGTH), generator=generator)
        row = torch.cat([tokens, torch.zeros_like(tokens[:, :1]), tokens], dim=1)
        targets = row[:, 1:].clone()
        targets[:, :LENGTH] = IGNORED
        return Batch(row[:, :-1], targets)


def run(console: Console, out: Path, share: float, seed: int) -> None:
    """Train a small model to copy with dense attention, then let different selections choose 8 keys for it.

    Args:
        console: where the table goes.
        out: folder of copy.png.
        share: of the full number of steps.
        seed: of weights and data.
    """
    console.print(f"copy {LENGTH} random tokens; each token may attend to {TOPK} of up to {2 * LENGTH} keys")
    untrained, model = train_copies(share, seed)
    held_out = Copies(10**6 + seed, 32).batch(0)
    cases: list[tuple[str, Glm5ForCausalLM, Selection]] = [
        ("dense: every key", model, "dense"),
        (f"trained indexer, top {TOPK}", model, "indexer"),
        (f"untrained indexer, top {TOPK}", untrained, "indexer"),
        (f"window: last {TOPK}", model, last_keys),
        (f"{TOPK} random keys", model, random_keys(seed)),
    ]
    scores = {name: 100 * accuracy(m, held_out, selection) for name, m, selection in cases}
    table = Table(box=None, header_style="bold")
    table.add_column("who selects the keys")
    table.add_column("copied right", justify="right")
    for name, score in scores.items():
        table.add_row(name, f"{score:.1f} %")
    console.print(table)
    draw(scores, out / "copy.png")


def train_copies(share: float, seed: int) -> tuple[Glm5ForCausalLM, Glm5ForCausalLM]:
    """(after dense training, with the indexers as they were drawn; after the whole recipe)."""
    torch.manual_seed(seed)
    model = Glm5ForCausalLM(small_config())
    steps = [max(1, round(share * n)) for n in (200, 50, 10)]
    phases = (
        Phase("dense", steps=steps[0], schedule="wsd", warmup=0.05, decay=0.3, final=0.1),
        Phase("indexer", steps=steps[1]),
        Phase("sparse", steps=steps[2], schedule="wsd", lr=0.2, warmup=0.0, decay=1.0, final=0.0),
    )
    trainer = Trainer(model, Copies(seed, 16), phases, OptimizerConfig(muon_lr=1e-2, adamw_lr=1e-2))
    untrained = model
    with Progress(True) as progress:
        while not trainer.done:
            record = trainer.train_step()
            progress.show(trainer, record, phases)
            if record.kind == "dense" and trainer.phase == 1:
                untrained = copy.deepcopy(model)
    return untrained, model


def small_config() -> Glm5Config:
    """Two layers: the fewest that can look up what followed the same token before."""
    return Glm5Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, index_n_heads=16,
        index_head_dim=32, index_topk=TOPK, rope_theta=1000.0, max_position_embeddings=256,
        num_nextn_predict_layers=0, dtype="float32",
    )  # fmt: skip


def last_keys(layer: int, batch: TokenBatch, topk: int) -> Tensor:
    """A sliding window: indices [T, 1, K]."""
    return ascending(batch.positions[:, None] - torch.arange(topk))


def random_keys(seed: int) -> Callable[[int, TokenBatch, int], Tensor]:
    """Random visible keys, other ones in each layer."""

    def select(layer: int, batch: TokenBatch, topk: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + layer)
        draw = torch.rand(len(batch.positions), batch.max_kv_len, generator=generator)
        visible = torch.arange(batch.max_kv_len) <= batch.positions[:, None]
        best = draw.masked_fill(~visible, -1.0).topk(topk)
        return ascending(torch.where(best.values >= 0, best.indices, -1))

    return select


def ascending(positions: Tensor) -> Tensor:
    """Positions [T, K], absent ones negative, in the order that ops take: ascending, then -1."""
    ordered = positions.where(positions >= 0, NOWHERE).sort(dim=1).values
    return ordered.where(ordered < NOWHERE, -1).to(torch.int32)[:, None]


def draw(scores: dict[str, float], path: Path) -> None:
    """Bars, best at the top."""
    figure = new_figure(7, 2.8)
    axes = figure.subplots()
    bars = axes.barh(list(scores), list(scores.values()), color=BLUE)
    axes.bar_label(bars, fmt="%.1f %%", padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel(f"tokens copied right, % ({TOPK} of up to {2 * LENGTH} keys)")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
