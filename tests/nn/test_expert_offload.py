"""Experts on disk: the bits of all resident, whatever the slots, the threads' timing and the faults."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import alone, expert_targets, linear_targets, save_adapter, small_model, step, tokens

import glm5sdk
from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, load_update, offload_experts
from glm5sdk.models.glm5.expert_placement import offload_stats
from glm5sdk.nn.adapters import load_adapter
from glm5sdk.nn.moe import ExpertPatch
from glm5sdk.nn.offload import OffloadedExperts, Reader
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.quant import quantise_model, scheme

pytestmark = pytest.mark.skipif(
    "cpu" not in glm5sdk.backends() or bool(glm5sdk.backends()["cpu"].reason), reason="needs the CPU backend"
)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def resident(request: pytest.FixtureRequest) -> Glm5ForCausalLM:
    return small_model(dtype=request.param)


@pytest.fixture(scope="module")
def folder(resident: Glm5ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    resident.save_pretrained(path)
    return path


def dtype_name(model: Glm5ForCausalLM) -> str:
    return str(model.dtype).removeprefix("torch.")


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 6, 99])
def test_any_number_of_slots_gives_the_same_bits(resident: Glm5ForCausalLM, folder: Path, slots: int) -> None:
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident), expert_slots=slots)
    for seed, length in ((1, 30), (2, 1), (3, 7)):
        assert torch.equal(alone(model, tokens(length, seed)), alone(resident, tokens(length, seed)))
    stats = offload_stats(model)
    assert stats.misses > 0 and stats.failed == 0
    assert stats.bytes_read >= stats.misses * 3 * 21 * 52 * resident.dtype.itemsize
    assert all(m.slots == min(slots, 6) for m in model.modules() if isinstance(m, OffloadedExperts))
    if slots >= 6:  # each expert is read once at most
        assert stats.misses <= 3 * 6


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_random_steps_give_the_same_bits(resident: Glm5ForCausalLM, folder: Path, data: st.DataObject) -> None:
    """Random slots, guesses on or off, steps of random sizes over a cache, MTP included; LRU order never matters."""
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident))
    slots = data.draw(st.integers(1, 6))
    offload_experts(model, folder, slots, lookahead=data.draw(st.booleans()))
    caches = [m.make_cache(3, 20, page_size=4) for m in (model, resident)]
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        new = [tokens(data.draw(st.integers(1, 5)), seed=data.draw(st.integers(0, 99))) for _ in rows]
        got, want = (step(m, c, rows, new) for m, c in zip((model, resident), caches, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ids, batch = tokens(8, seed=1), TokenBatch.packed([7])
    with torch.no_grad():
        hidden = resident.hidden_states(ids[:-1], resident.context(batch))
        got, want = (m.mtp_hidden_states(ids[1:], hidden, m.context(batch)) for m in (model, resident))
    assert torch.equal(got, want)


def test_no_tokens(resident: Glm5ForCausalLM, folder: Path) -> None:
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident), expert_slots=2)
    assert alone(model, tokens(0, 0)).shape == (0, 97)


def test_a_slow_disk_changes_nothing(resident: Glm5ForCausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that end in the middle of a step, and guesses that occupy every slot."""
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident))
    offload_experts(model, folder, 3, lookahead=True)
    pause = threading.Event()
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            read = module.source.read
            monkeypatch.setattr(module.source, "read", lambda *a, read=read: (pause.wait(0.003), read(*a))[1])
    for seed in range(6):  # one token has three experts: a guess fills every slot
        length = (1, 9)[seed % 2]
        assert torch.equal(alone(model, tokens(length, seed)), alone(resident, tokens(length, seed)))
    assert offload_stats(model).hinted > 0


def test_quantised_experts(tmp_path: Path) -> None:
    for name in ("w8a8", "w4a8-experts", "fp8"):
        model = small_model(hidden_size=160, moe_intermediate_size=128)
        quantise_model(model, scheme(name), tokens(24, seed=1)[None], "rtn")
        model.save_pretrained(tmp_path / name)
        for quantised in (True, False):
            want = Glm5ForCausalLM.from_pretrained(tmp_path / name, quantised=quantised)
            got = Glm5ForCausalLM.from_pretrained(tmp_path / name, quantised=quantised, expert_slots=2)
            assert torch.equal(alone(got, tokens(20, seed=2)), alone(want, tokens(20, seed=2)))
            later = offload_experts(want, tmp_path / name, 4)
            assert torch.equal(alone(later, tokens(20, seed=2)), alone(got, tokens(20, seed=2)))


def test_an_empty_folder_gets_the_models_own_weights(tmp_path: Path) -> None:
    model = small_model()
    want = alone(model, tokens(20, seed=1))
    assert torch.equal(alone(offload_experts(model, tmp_path, 2), tokens(20, seed=1)), want)


def test_a_budget_is_kept(resident: Glm5ForCausalLM, folder: Path) -> None:
    each = 3 * 21 * 52 * resident.dtype.itemsize
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident))
    offload_experts(model, folder, budget_bytes=3 * 2 * each + each)
    held = [m for m in model.modules() if isinstance(m, OffloadedExperts)]
    assert [m.slots for m in held] == [2, 2, 2] and sum(m.nbytes for m in held) == 3 * 2 * each
    for options, said in (({}, "exactly one"), ({"slots": 1, "budget_bytes": 1}, "exactly one")):
        with pytest.raises(ContractError, match=said):
            offload_experts(small_model(), folder, **options)
    with pytest.raises(
        CapacityError, match=f"budget is 5 bytes, needs at least {3 * each} for one expert in each of 3"
    ):
        offload_experts(small_model(dtype=resident.dtype), folder, budget_bytes=5)
    with pytest.raises(CapacityError, match="slots is 0"):
        offload_experts(small_model(), folder, 0)
    with pytest.raises(ContractError, match="experts is not whole in memory"):
        model.save_pretrained(folder)


def test_damage_is_an_error_of_the_request_and_heals(tmp_path: Path) -> None:
    """A file that is cut, changed or rotten: an error that names tensor and file, and the model lives on."""
    model = small_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, ids = file.read_bytes(), tokens(20, seed=1)
    want = alone(model, ids)
    offload_experts(model, tmp_path, 1)
    assert torch.equal(alone(model, ids), want)
    stamp = file.stat()

    def write(data: bytes) -> None:
        with file.open("r+b") as stream:  # in place: the same inode
            stream.write(data)
            stream.truncate()
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    write(whole[: len(whole) // 3])
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.\d\.mlp\.experts\.\d.*in .*model\.safetensors (ends|has changed)"
    ):
        alone(model, ids)
    rotten = bytearray(whole)
    for at in range(len(whole) // 8, len(whole), 500):
        rotten[at] ^= 1
    write(bytes(rotten))
    with pytest.raises(CheckpointError, match="has checksum"):
        alone(model, ids)
    write(whole)
    os.utime(file)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        alone(model, ids)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert torch.equal(alone(model, ids), want)
    assert offload_stats(model).failed >= 3
    file.unlink()  # an open file stays readable
    assert torch.equal(alone(model, ids), want)


def test_a_checkpoint_without_all_experts_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = small_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.experts\.3"):
        offload_experts(model, tmp_path, 2)
    assert not any(isinstance(m, OffloadedExperts) for m in model.modules())


def test_views_swap_experts_that_are_offloaded(resident: Glm5ForCausalLM, folder: Path, tmp_path: Path) -> None:
    """A patch stands before the slots; a checkpoint with all of a layer's experts becomes their source."""
    small_model(7, dtype=resident.dtype).save_pretrained(tmp_path)
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident), expert_slots=2)
    path = "model.layers.1.mlp.experts"
    own = resident.get_submodule(path)
    patch = ExpertPatch((0, 3), own.gate_up_proj.detach()[[5, 4]], own.down_proj.detach()[[5, 4]])
    views = [WeightView.of(m, "base") for m in (model, resident)]
    patched = [v.replaced("patched", patches={path: patch}) for v in views]
    whole = [load_update(tmp_path, m, v) for m, v in zip((model, resident), views, strict=True)]
    assert whole[0].version == whole[1].version
    assert not whole[0].patches and whole[0].nbytes_beside(views[0]) < 0.8 * whole[1].nbytes_beside(views[1])
    ids = tokens(20, seed=1)
    for mine, theirs in (patched, whole, views, whole, patched, views):
        with mine.active(model), theirs.active(resident):
            assert torch.equal(alone(model, ids), alone(resident, ids))
    whole[0].install(model)
    with whole[1].active(resident):
        assert torch.equal(alone(model, ids), alone(resident, ids))
    with pytest.raises(ContractError, match="needs the path of experts that are offloaded"):
        views[1].replaced("x", sources={path: model.get_submodule(path).source})


def test_adapters_beside_offloaded_experts(resident: Glm5ForCausalLM, folder: Path, tmp_path: Path) -> None:
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype_name(resident), expert_slots=2)
    save_adapter(tmp_path / "good", resident, linear_targets(resident))
    answers = []
    for m in (model, resident):
        with WeightView.of(m, "base").with_adapter("a", load_adapter(tmp_path / "good", m)).active(m):
            answers.append(alone(m, tokens(20, seed=1)))
    assert torch.equal(*answers)
    save_adapter(tmp_path / "experts", resident, expert_targets([1], [0]))
    with pytest.raises(CheckpointError, match="needs a layer with all of its experts in memory"):
        load_adapter(tmp_path / "experts", model)


def test_casting_the_model_casts_the_slots(folder: Path, resident: Glm5ForCausalLM) -> None:
    model = Glm5ForCausalLM.from_pretrained(folder, dtype="float32", expert_slots=3)
    alone(model, tokens(5, seed=1))
    want = Glm5ForCausalLM.from_pretrained(folder, dtype="bfloat16")
    assert torch.equal(alone(model.to(torch.bfloat16), tokens(20, seed=1)), alone(want, tokens(20, seed=1)))


def test_a_closed_reader_says_so(folder: Path) -> None:
    reader = Reader()
    assert reader.submit(lambda: 3).result() == 3
    reader.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        reader.submit(lambda: 3)


PEAK = """
    import sys, torch
    from glm5sdk.models.glm5 import Glm5ForCausalLM
    slots = int(sys.argv[2]) or None
    def peak(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
    Glm5ForCausalLM.from_pretrained(sys.argv[3])
    before = peak()
    model = Glm5ForCausalLM.from_pretrained(sys.argv[1], expert_slots=slots)
    model(torch.arange(24)[None])
    print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of a process's memory")
def test_peak_memory_is_that_of_the_slots(tmp_path: Path) -> None:
    """In a process of its own: loading and running with two slots never holds all experts."""
    wide = dict(hidden_size=256, moe_intermediate_size=512, n_routed_experts=32, num_hidden_layers=3)
    big, small = small_model(**wide), small_model()
    experts = sum(p.nbytes for n, p in big.named_parameters() if ".experts." in n)
    big.save_pretrained(tmp_path / "big")
    small.save_pretrained(tmp_path / "small")
    grown = []
    for slots in (0, 2):
        command = [sys.executable, "-c", textwrap.dedent(PEAK), tmp_path / "big", str(slots), tmp_path / "small"]
        grown.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert experts > 150e6
    assert grown[0] > experts
    assert grown[1] < 0.35 * experts
