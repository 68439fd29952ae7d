"""Experts over processes: the bits of one process, idle ranks and full ranks included; faults seen elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from nn_cases import alone, expert_targets, linear_targets, save_adapter, small_model, tokens
from safetensors.torch import load_file, save_file

import glm5sdk
from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, load_update
from glm5sdk.models.glm5.expert_placement import spread_experts
from glm5sdk.nn.adapters import load_adapter
from glm5sdk.nn.expert_parallel import ParallelExperts
from glm5sdk.nn.moe import Experts, Router
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.parallel import ProcessGroup, close_processes, join_processes, make_mesh

pytestmark = pytest.mark.skipif(
    "cpu" not in glm5sdk.backends() or bool(glm5sdk.backends()["cpu"].reason), reason="needs the CPU backend"
)
DTYPES = ("float32", "bfloat16")


@torch.no_grad()
def drafts(model: Glm5ForCausalLM, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Hidden states after several MTP steps; every one calls the experts, so all ranks take the same number."""
    batch = TokenBatch.packed([max(len(ids) - 1, 0)])
    hidden = model.hidden_states(ids[:-1], model.context(batch))
    for _ in range(steps):
        hidden = model.mtp_hidden_states(ids[1:], hidden, model.context(batch))
    return hidden


def same_bits_whoever_is_idle(rank: int, size: int, folder: Path, group: ProcessGroup) -> None:
    for dtype in DTYPES:
        whole = Glm5ForCausalLM.from_pretrained(folder / dtype)
        model = Glm5ForCausalLM.from_pretrained(folder / dtype, expert_group=group)
        held = [m for m in model.modules() if isinstance(m, ParallelExperts)]
        assert len(held) == 3 and all(m.gate_up_proj.shape[0] == 6 // size for m in held)
        later = Glm5ForCausalLM.from_pretrained(folder / dtype)
        spread_experts(later, group)
        for lengths in ([17, 0, 5], [0, 9, 0], [1, 1, 1], [0, 0, 0], [40, 41, 3]):
            ids = tokens(lengths[rank], seed=rank)
            for other in (model, later):
                assert torch.equal(alone(other, ids), alone(whole, ids)), (dtype, lengths)
                assert torch.equal(drafts(other, ids, 3), drafts(whole, ids, 3))


def buffers_are_kept(rank: int, size: int, folder: Path, group: ProcessGroup) -> None:
    whole = Glm5ForCausalLM.from_pretrained(folder / "bfloat16")
    for model in (
        Glm5ForCausalLM.from_pretrained(folder / "bfloat16", expert_group=group),
        small_model(dtype=torch.bfloat16),
    ):
        if not any(isinstance(m, ParallelExperts) for m in model.modules()):
            spread_experts(model, group)
        gates = [m for m in model.modules() if isinstance(m, Router)]
        assert [dict(m.named_buffers()).keys() for m in gates] == [{"e_score_correction_bias": 0}.keys()] * 3
        for mine, theirs in zip(gates, (m for m in whole.modules() if isinstance(m, Router)), strict=True):
            assert mine.e_score_correction_bias.dtype == torch.float32
            assert torch.equal(mine.e_score_correction_bias, theirs.e_score_correction_bias)
            assert mine.e_score_correction_bias.abs().min() > 6


def capacity_is_everybodys_error(rank: int, size: int, folder: Path, group: ProcessGroup) -> None:
    """Drafts multiply the tokens of a step: what does not fit is said on every rank, with the numbers."""
    model = small_model()
    spread_experts(model, group, capacity=20)
    ids = tokens(21 if rank == 0 else 0, seed=0)  # 63 rows, so more than 20 at some rank whatever the router says
    with pytest.raises(CapacityError, match=r"capacity of rank \d is 20, needs \d+ rows"):
        alone(model, ids)
    assert torch.equal(alone(model, tokens(1, seed=rank)), alone(small_model(), tokens(1, seed=rank)))


def updates_reach_their_owner(rank: int, size: int, folder: Path, group: ProcessGroup) -> None:
    """A checkpoint of some experts patches those of this process; one of everything replaces its share."""
    model = Glm5ForCausalLM.from_pretrained(folder / "float32", expert_group=group)
    whole = Glm5ForCausalLM.from_pretrained(folder / "float32")
    mine, theirs = WeightView.of(model, "base"), WeightView.of(whole, "base")
    ids = tokens(11, seed=rank)
    for update in ("some", "update"):
        new, want = load_update(folder / update, model, mine), load_update(folder / update, whole, theirs)
        with new.active(model), want.active(whole):
            assert torch.equal(alone(model, ids), alone(whole, ids))
        assert torch.equal(alone(model, ids), alone(whole, ids))


def adapters_beside_spread_experts(rank: int, size: int, folder: Path, group: ProcessGroup) -> None:
    """Every process has the matrices that they add to; one for experts is refused by all, not by some."""
    whole = Glm5ForCausalLM.from_pretrained(folder / "float32")
    model = Glm5ForCausalLM.from_pretrained(folder / "float32", expert_group=group)
    ids, answers = tokens(11, seed=rank), []
    for m in (model, whole):
        view = WeightView.of(m, "base").with_adapter("a", load_adapter(folder / "adapter", m))
        with view.active(m):
            answers.append(alone(m, ids))
    assert torch.equal(*answers)
    with pytest.raises(CheckpointError, match="needs a layer with all of its experts in memory"):
        load_adapter(folder / "expert adapter", model)


CHECKS = (
    same_bits_whoever_is_idle,
    buffers_are_kept,
    capacity_is_everybodys_error,
    updates_reach_their_owner,
    adapters_beside_spread_experts,
)


def work(rank: int, size: int, folder: Path) -> None:
    """One process; an assertion that fails here fails the test."""
    torch.set_num_threads(1)
    join_processes(rank, size, f"file://{folder}/meeting{size}", timeout_s=60)
    try:
        group = make_mesh({"expert": size})["expert"]
        with glm5sdk.use("cpu"):
            for check in CHECKS:
                check(rank, size, folder, group)
    finally:
        close_processes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread")
    for dtype in DTYPES:
        small_model(dtype=getattr(torch, dtype)).save_pretrained(path / dtype)
    small_model(1).save_pretrained(path / "update")
    save_adapter(path / "adapter", small_model(), linear_targets(small_model()))
    save_adapter(path / "expert adapter", small_model(), expert_targets([1], [0]))
    (path / "some").mkdir()
    tensors = load_file(str(path / "update" / "model.safetensors"))
    chosen = {n: t for n, t in tensors.items() if "layers.2.mlp.experts.1." in n or "layers.2.mlp.experts.4." in n}
    save_file(chosen, str(path / "some" / "model.safetensors"))
    return path


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_equal_one_bit_for_bit(folder: Path, size: int) -> None:
    torch.multiprocessing.spawn(work, (size, folder), nprocs=size)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(ContractError, match="number of routed experts is 6, needs a multiple of the group's 4"):
        spread_experts(model, ProcessGroup("g", 0, 4))
    assert type(model.model.layers[1].mlp.experts) is Experts
    with pytest.raises(ContractError, match="capacity is 0"):
        spread_experts(model, ProcessGroup(), capacity=0)
    spread_experts(model, ProcessGroup())
    with pytest.raises(ContractError, match="is ParallelExperts, needs plain float Experts"):
        spread_experts(model, ProcessGroup())
    with pytest.raises(ContractError, match="not whole in memory"):
        model.save_pretrained(tmp_path)
    small_model().save_pretrained(tmp_path)
    with pytest.raises(ContractError, match="needs one of them at most"):
        Glm5ForCausalLM.from_pretrained(tmp_path, expert_slots=1, expert_group=ProcessGroup())
