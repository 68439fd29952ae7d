"""load_update: whole and partial checkpoints become views; nothing changes before everything is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import random_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

import glm5sdk
from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, load_update, preset, read_update
from glm5sdk.nn.adapters import Adapter
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.quant import quantise_model, scheme

pytestmark = pytest.mark.skipif(
    "cpu" not in glm5sdk.backends() or bool(glm5sdk.backends()["cpu"].reason), reason="needs the CPU backend"
)
FILE = "model.safetensors"


def small(seed: int, **changes: object) -> Glm5ForCausalLM:
    torch.manual_seed(seed)
    options = {"num_hidden_layers": 2, "index_topk": 8, "initializer_range": 0.1, "n_routed_experts": 5}
    model = Glm5ForCausalLM(preset("tiny", **{**options, **changes})).eval()
    with torch.no_grad():
        for name, b in model.named_buffers():
            if name.endswith("correction_bias"):
                b.copy_(7 + 0.05 * torch.randn_like(b))
    return model


@torch.no_grad()
def logits(model: Glm5ForCausalLM) -> Tensor:
    return model(random_ids(2, 20, seed=1))


def under(view: WeightView, model: Glm5ForCausalLM) -> Tensor:
    with view.active(model):
        return logits(model)


@pytest.fixture
def model() -> Glm5ForCausalLM:
    return small(0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other")
    small(1).save_pretrained(path)
    return path


def part(other: Path, to: Path, keep: Callable[[str], bool], **changed: Tensor) -> Path:
    """A checkpoint of some tensors of another one, without a config."""
    to.mkdir(exist_ok=True)
    tensors = {name: t for name, t in load_file(str(other / FILE)).items() if keep(name)}
    save_file({**tensors, **changed}, str(to / FILE))
    return to


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_checkpoint_equals_loading_it(model: Glm5ForCausalLM, other: Path, dtype: str) -> None:
    model.to(getattr(torch, dtype))
    before = logits(model)
    view = load_update(other, model, WeightView.of(model, "base"), "step-100")
    assert view.version == "step-100" and not view.patches
    assert torch.equal(under(view, model), logits(Glm5ForCausalLM.from_pretrained(other, dtype=dtype)))
    assert torch.equal(logits(model), before)
    view.install(model)
    assert torch.equal(logits(model), logits(Glm5ForCausalLM.from_pretrained(other, dtype=dtype)))


def test_some_experts_become_a_patch(model: Glm5ForCausalLM, other: Path, tmp_path: Path) -> None:
    chosen = ("layers.1.mlp.experts.0.", "layers.1.mlp.experts.3.", "layers.2.mlp.experts.4.")
    path = part(other, tmp_path / "part", lambda n: any(c in n for c in chosen))
    base = WeightView.of(model, "base")
    view = load_update(path, model, base)
    assert {k: p.ids for k, p in view.patches.items()} == {
        "model.layers.1.mlp.experts": (0, 3),
        "model.layers.2.mlp.experts": (4,),
    }
    assert view.nbytes_beside(base) == 3 * 3 * 192 * 128 * 4
    model.save_pretrained(tmp_path / "mixed")
    tensors = load_file(str(tmp_path / "mixed" / FILE)) | load_file(str(path / FILE))
    save_file(tensors, str(tmp_path / "mixed" / FILE))
    want = Glm5ForCausalLM.from_pretrained(tmp_path / "mixed")
    assert torch.equal(under(view, model), logits(want))
    assert not torch.equal(logits(want), logits(model))


def test_all_experts_of_a_layer_replace_it(model: Glm5ForCausalLM, other: Path, tmp_path: Path) -> None:
    path = part(other, tmp_path, lambda n: "layers.1.mlp.experts." in n)
    view = load_update(path / FILE, model, WeightView.of(model, "base"))
    assert not view.patches
    fused = Glm5ForCausalLM.from_pretrained(other).model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(view.weight("model.layers.1.mlp.experts.gate_up_proj"), fused)


def test_the_version_tells_contents(model: Glm5ForCausalLM, other: Path, tmp_path: Path) -> None:
    base = WeightView.of(model, "base")
    first = load_update(other, model, base).version
    small(1).save_pretrained(tmp_path / "shards", max_shard_bytes=1_000_000)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    assert load_update(tmp_path / "shards", model, base).version == first, "files are not contents"
    part(other, tmp_path / "part", lambda n: "layers.1.mlp.experts.2." in n)
    update = read_update(tmp_path / "part", model, base)
    assert len({update.on(base).version, update.on(base.replaced("another")).version, first}) == 3
    small(2).save_pretrained(tmp_path / "third")
    assert load_update(tmp_path / "third", model, base).version != first


def test_quantised_models_take_their_own_kind(tmp_path: Path) -> None:
    for name in ("w8a8", "w4a8-experts", "fp8"):
        for seed in (0, 1):
            made = small(seed)
            quantise_model(made, scheme(name), random_ids(1, 24, seed=3), "rtn")
            made.save_pretrained(tmp_path / f"{name}{seed}")
        model = Glm5ForCausalLM.from_pretrained(tmp_path / f"{name}0", quantised=True)
        base = WeightView.of(model, "base")
        view = load_update(tmp_path / f"{name}1", model, base)
        want = logits(Glm5ForCausalLM.from_pretrained(tmp_path / f"{name}1", quantised=True))
        assert torch.equal(under(view, model), want)
        path = part(tmp_path / f"{name}1", tmp_path / f"{name}part", lambda n: "layers.1.mlp.experts.2." in n)
        patched = load_update(path, model, base)
        assert patched.nbytes_beside(base) < view.nbytes_beside(base) / 10
        mixed = load_file(str(tmp_path / f"{name}0" / FILE)) | load_file(str(path / FILE))
        save_file(mixed, str(tmp_path / f"{name}0" / FILE))
        mixed_model = Glm5ForCausalLM.from_pretrained(tmp_path / f"{name}0", quantised=True)
        assert torch.equal(under(patched, model), logits(mixed_model))
        small(1).save_pretrained(tmp_path / "float")
        with pytest.raises(CheckpointError, match="is plain, needs"):
            load_update(tmp_path / "float", model, base)
        float_model = Glm5ForCausalLM.from_pretrained(tmp_path / f"{name}0", quantised=False)
        got = under(load_update(tmp_path / f"{name}1", float_model, WeightView.of(float_model, "base")), float_model)
        assert torch.equal(got, logits(Glm5ForCausalLM.from_pretrained(tmp_path / f"{name}1", quantised=False)))


def replaced(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(str(folder / FILE))
        tensors[name] = value(tensors[name])
        save_file(tensors, str(folder / FILE))

    return spoil


def without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(str(folder / FILE))
        del tensors[name]
        save_file(tensors, str(folder / FILE))

    return spoil


def added(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        save_file({**load_file(str(folder / FILE)), name: torch.ones(2)}, str(folder / FILE))

    return spoil


def other_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"routed_scaling_factor": 1.0}))


def cut(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[: len(whole) - 1000])


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "model.safetensors is truncated"),
    "shape": (replaced("model.norm.weight", lambda t: t[:-1].clone()), r"norm.weight .* is \[191\], needs \[192\]"),
    "dtype": (replaced("model.norm.weight", lambda t: t.int()), "model.norm.weight .* is I32"),
    "nan": (replaced(EXPERT, lambda t: t.index_fill(0, torch.tensor([3]), math.nan)), f"{EXPERT} .* infinity or NaN"),
    "infinity": (replaced("lm_head.weight", lambda t: t * math.inf), "lm_head.weight .* infinity or NaN"),
    "stranger": (added("model.layers.9.x"), "has an unexpected 1 .model.layers.9.x"),
    "torn expert": (without(EXPERT), "has only down_proj, gate_proj of model.layers.1.mlp.experts.2"),
    "config": (other_config, "routed_scaling_factor in .*config.json is 1.0, needs the model's 2.5"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SPOILED)
def test_a_spoiled_checkpoint_changes_nothing(model: Glm5ForCausalLM, tmp_path: Path, fault: str) -> None:
    small(1).save_pretrained(tmp_path)
    base = WeightView.of(model, "base")
    before, pointers = logits(model), [p.data_ptr() for p in model.parameters()]
    spoil, said = SPOILED[fault]
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        load_update(tmp_path, model, base)
    assert torch.equal(logits(model), before) and torch.equal(under(base, model), before)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    model = small(0).to(torch.float16)
    save_file({"model.norm.weight": torch.full((192,), 1e6)}, str(tmp_path / FILE))
    with pytest.raises(CheckpointError, match=r"model.norm.weight in .* infinity or NaN as torch.float16"):
        load_update(tmp_path, model, WeightView.of(model, "base"))


def test_nothing_to_load_and_adapters_are_refused(model: Glm5ForCausalLM, tmp_path: Path) -> None:
    base = WeightView.of(model, "base")
    save_file({}, str(tmp_path / FILE))
    with pytest.raises(CheckpointError, match="holds no tensor of the model"):
        load_update(tmp_path, model, base)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_update(tmp_path / "nowhere", model, base)
    with pytest.raises(ContractError, match="has an adapter, needs none"):
        load_update(tmp_path, model, base.with_adapter("x", Adapter("x")))


def test_an_mtp_head_of_its_own_is_not_left_behind(tmp_path: Path) -> None:
    small(0).save_pretrained(tmp_path / "a")
    tensors = load_file(str(tmp_path / "a" / FILE))
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"] * 2
    save_file(tensors, str(tmp_path / "a" / FILE))
    model = Glm5ForCausalLM.from_pretrained(tmp_path / "a")
    base = WeightView.of(model, "base")
    small(1).save_pretrained(tmp_path / "b")
    with pytest.raises(CheckpointError, match="has lm_head.weight and not model.layers.2.shared_head.head.weight"):
        load_update(tmp_path / "b", model, base)
    replaced("lm_head.weight", lambda t: t * 3)(tmp_path / "a")
    view = load_update(tmp_path / "a", model, base)
    with view.active(model):
        assert torch.equal(model.mtp_head(), tensors["lm_head.weight"] * 2)
    replaced("model.layers.2.shared_head.head.weight", lambda t: t * 1.5)(tmp_path / "a")  # now equal to lm_head
    view = load_update(tmp_path / "a", model, base)
    with view.active(model):
        assert torch.equal(model.mtp_head(), tensors["lm_head.weight"] * 3)
    replaced("model.layers.2.shared_head.head.weight", lambda t: t * 2)(tmp_path / "a")
    plain = small(0)
    with pytest.raises(CheckpointError, match="shared_head.head.weight in .* is no parameter of this model"):
        load_update(tmp_path / "a", plain, WeightView.of(plain, "base"))
