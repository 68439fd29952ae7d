"""The loop: it learns, it stops where it should, and a resumed run gives the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import RandomBatches, small_config, small_model, write_texts

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.text import Tokenizer
from glm5sdk.train import OptimizerConfig, Phase, TrainConfig, Trainer, train
from glm5sdk.train.checkpoint import STATE, latest_checkpoint, load_state
from glm5sdk.train.plot import plot_losses
from glm5sdk.train.trainer import Record

SHORT = (Phase("dense", steps=4), Phase("indexer", steps=2), Phase("sparse", steps=3))


def losses(history: list[Record]) -> list[tuple[Any, ...]]:
    """Everything but the time."""
    return [(r.step, r.kind, r.language, r.mtp, r.kl, r.gradient, r.lr, r.tokens) for r in history]


def small_run(folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = dict(
        data=[folder / "texts"], model=small_config(), phases=SHORT, batch_size=2, seq_len=16, held_out=0.25,
        eval_sequences=4, seed=3, progress=False,
    )  # fmt: skip
    return TrainConfig(**(values | changes))


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_learns_one_batch_by_heart(name: str) -> None:
    config = OptimizerConfig(name=name, muon_lr=2e-2, adamw_lr=2e-2)
    trainer = Trainer(small_model(), RandomBatches(1, 12, same=True), [Phase("dense", steps=60)], config)
    trainer.run()
    assert trainer.history[0].language > 5
    assert trainer.history[-1].language < 0.5
    assert trainer.history[-1].mtp < 1.5


def test_phases_follow_each_other_and_leave_the_selection_alone() -> None:
    model, seen = small_model(), []
    trainer = Trainer(model, RandomBatches(), SHORT)
    trainer.run(seen.append)
    assert [r.kind for r in seen] == ["dense"] * 4 + ["indexer"] * 2 + ["sparse"] * 3
    assert [r.step for r in seen] == list(range(1, 10))
    assert seen == trainer.history
    assert trainer.done
    assert model.selection == "indexer"
    with pytest.raises(ContractError, match="phase is 3, needs one of the 3"):
        trainer.train_step()


def test_frozen_weights_stay_the_same_bits() -> None:
    model = small_model()
    trainer = Trainer(model, RandomBatches(), [Phase("dense", steps=2), Phase("indexer", steps=2)], balance_rate=0.0)
    start = copy.deepcopy(model.state_dict())
    trainer.train_step()
    trainer.train_step()
    middle = copy.deepcopy(model.state_dict())
    trainer.run()
    for name, value in model.state_dict().items():
        before, after = (start[name], middle[name]) if ".indexer." in name else (middle[name], value)
        assert torch.equal(before, after), name


def test_a_phase_of_seconds_ends_by_the_clock() -> None:
    trainer = Trainer(small_model(), RandomBatches(), [Phase("dense", seconds=0.2), Phase("dense", seconds=1e-9)])
    trainer.run()
    first = [r for r in trainer.history if r.phase == 0]
    assert sum(r.seconds for r in first) >= 0.2
    assert sum(r.seconds for r in first[:-1]) < 0.2
    assert len(trainer.history) == len(first) + 1  # however short, a phase has a step


def test_a_resumed_trainer_gives_the_same_bits(tmp_path: Path) -> None:
    whole = Trainer(small_model(), RandomBatches(), SHORT)
    whole.run()
    for cut in (2, 5, 7):  # in each phase
        first = Trainer(small_model(), RandomBatches(), SHORT)
        for _ in range(cut):
            first.train_step()
        first.model.save_pretrained(tmp_path / str(cut))
        torch.save(first.state_dict(), tmp_path / f"{cut}.pt")
        model = Glm5ForCausalLM.from_pretrained(tmp_path / str(cut))
        second = Trainer(model, RandomBatches(), SHORT)
        second.load_state_dict(torch.load(tmp_path / f"{cut}.pt", weights_only=True))
        second.run()
        assert losses(second.history) == losses(whole.history)
        for (name, a), b in zip(model.state_dict().items(), whole.model.state_dict().values(), strict=True):
            assert torch.equal(a, b), name


def test_gives_up_on_gradients_that_are_never_finite() -> None:
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    trainer = Trainer(model, RandomBatches(), [Phase("dense", steps=100)])
    with pytest.raises(RuntimeError, match="not finite 5 times in a row"):
        trainer.run()
    assert trainer.step == 4


def test_refuses_sequences_beyond_the_model() -> None:
    trainer = Trainer(small_model(), RandomBatches(1, 65), [Phase("dense", steps=1)])
    with pytest.raises(ContractError, match="sequence length is 65, needs at most max_position_embeddings 64"):
        trainer.run()
    assert trainer.history == []


def test_refuses_an_indexer_phase_without_indexer() -> None:
    model = small_model(sparse_pattern="window_stride", sparse_window=4, sparse_stride=4, num_nextn_predict_layers=0)
    with pytest.raises(ContractError, match="sparse_pattern is 'window_stride'"):
        Trainer(model, RandomBatches(), SHORT)
    trainer = Trainer(model, RandomBatches(), [Phase("dense", steps=1), Phase("sparse", steps=1)])
    trainer.run()
    assert trainer.history[-1].kl == 0.0


def test_refuses_a_state_of_another_version() -> None:
    trainer = Trainer(small_model(), RandomBatches(), SHORT)
    state = trainer.state_dict()
    del state["phase"]
    with pytest.raises(CheckpointError, match="'phase'"):
        trainer.load_state_dict(state)


def test_run_saves_resumes_and_loads(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    out = tmp_path / "out"
    whole = train(small_run(tmp_path, out=out, save_every=5, eval_every=4))
    assert losses(whole.history)[-1][0] == 9
    assert [e.step for e in whole.evaluations] == [4, 8, 9]
    assert whole.checkpoint == out / "step-00000009"
    assert whole.final.sparse.bits_per_byte > 0
    assert whole.final.gap == whole.final.sparse.nats - whole.final.dense.nats
    assert set(whole.tokens_per_second) == {"dense", "indexer", "sparse"}
    assert whole.peak_memory > 2**20
    assert sorted(f.name for f in out.iterdir()) == ["step-00000005", "step-00000009", "tokenizer"]

    loaded = Glm5ForCausalLM.from_pretrained(whole.checkpoint)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids), whole.model(ids))
    tokenizer = Tokenizer.from_pretrained(whole.checkpoint)
    assert loaded.config.eos_token_id[0] == tokenizer.token_id("<|endoftext|>")

    # As if the machine had died after step 5 and left half a checkpoint behind.
    for file in whole.checkpoint.iterdir():
        file.unlink()
    whole.checkpoint.rename(out / ".step-00000009.part")
    again = train(small_run(tmp_path, out=out, save_every=5, eval_every=4, resume=True))
    assert losses(again.history) == losses(whole.history)
    assert again.evaluations == whole.evaluations
    assert latest_checkpoint(out) == whole.checkpoint

    # A finished run that is resumed has nothing to do; a new run may start from its weights and tokenizer.
    assert losses(train(small_run(tmp_path, out=out, resume=True)).history) == losses(whole.history)
    on = train(small_run(tmp_path, start=whole.checkpoint, phases=(Phase("sparse", steps=1),)))
    assert on.checkpoint is None
    assert on.history[0].language < whole.history[0].language


def test_two_runs_of_one_seed_are_equal(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    first, second = (train(small_run(tmp_path)) for _ in range(2))
    assert losses(first.history) == losses(second.history)
    assert losses(train(small_run(tmp_path, seed=4)).history) != losses(first.history)


def test_damaged_or_missing_checkpoints(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    assert latest_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="file is missing"):
        load_state(tmp_path)
    (tmp_path / STATE).write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(tmp_path)
    with pytest.raises(CheckpointError):
        train(small_run(tmp_path, start=tmp_path / "nothing"))


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"seq_len": 65}, "seq_len is 65, needs at most max_position_embeddings 64"),
        ({"model": "huge"}, "preset: name is 'huge'"),
        ({"data": ["nowhere"]}, "nowhere does not exist"),
        ({"suffixes": (".rs",)}, "holds no file"),
    ],
)
def test_refuses_before_it_writes(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    write_texts(tmp_path / "texts")
    with pytest.raises(ContractError, match=word):
        train(small_run(tmp_path, **({"out": tmp_path / "out"} | changes)))
    assert not (tmp_path / "out").exists()


def test_refuses_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("short")
    with pytest.raises(ContractError, match=r"stream is \d+ tokens long, needs at least seq_len \+ 1 = 17"):
        train(small_run(tmp_path, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = [
        Record(i + 1, i // 4, kind, 5.0 / (i + 1), 5.0, 0.5, 1.0, 1.0, 32, 0.1)
        for i, kind in enumerate(["dense"] * 4 + ["indexer"] * 4 + ["sparse"] * 4)
    ]
    file = tmp_path / "loss.png"
    plot_losses(history, file, "a title")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert file.stat().st_size > 10_000
    plot_losses(history[:1], file)
    with pytest.raises(ContractError, match="history is empty"):
        plot_losses([], file)
