"""LoRA: PEFT folders read strictly, applied beside the weights as float64 says, merged where asked."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nn_cases import alone, expert_targets, linear_targets, save_adapter, small_model, tokens
from safetensors.torch import load_file, save_file

import glm5sdk
from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.nn.adapters import load_adapter, merge
from glm5sdk.nn.low_rank import LowRank
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.quant import quantise_model, scheme
from glm5sdk.registry.weight import load_weight


def every_target(model: Glm5ForCausalLM) -> list[str]:
    return [*linear_targets(model), *expert_targets([1, 2, 3], [0, 3, 5])]


def adapted(model: Glm5ForCausalLM, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    view = WeightView.of(model, "base").with_adapter("adapter", load_adapter(folder, model))
    with view.active(model):
        return alone(model, ids)


def by_hand(
    model: Glm5ForCausalLM, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: float
) -> Glm5ForCausalLM:
    """A float64 model whose weights are W + scale B A."""
    other = copy.deepcopy(model).double()
    for target, (a, b) in pairs.items():
        delta = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64)
        for r in range(a.shape[0]):
            delta += scale * torch.outer(b[:, r].double(), a[r].double())
        layer, _, rest = target.partition(".mlp.experts.")
        if not rest:
            weight = other.get_submodule(target).weight
            load_weight(weight, weight.detach() + delta)
            continue
        experts = other.get_submodule(f"{layer}.mlp.experts")
        e, part = rest.split(".")
        inner = other.config.moe_intermediate_size
        weight = experts.down_proj if part == "down_proj" else experts.gate_up_proj
        index: Any = {"gate_proj": (int(e), slice(0, inner)), "up_proj": (int(e), slice(inner, None))}.get(part, int(e))
        load_weight(weight, weight.detach()[index] + delta, index)
    return other


@pytest.mark.parametrize("rslora", [False, True])
def test_equals_the_sum_of_outer_products_in_float64(tmp_path: Path, rslora: bool) -> None:
    model = small_model().double()
    model.selection = "dense"  # a near tie of the selection would count as an error
    pairs = save_adapter(tmp_path, model, every_target(model), rank=4, use_rslora=rslora)
    want = alone(by_hand(model, pairs, 8 / (2 if rslora else 4)), tokens(25, seed=1))
    got = adapted(model, tmp_path, tokens(25, seed=1))
    assert (got - want).abs().max() < 1e-10
    assert (alone(model, tokens(25, seed=1)) - want).abs().max() > 0.1, "the adapter should matter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_or_merged_differ_by_rounding_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small_model(dtype=dtype)
    model.selection = "dense"
    save_adapter(tmp_path, model, every_target(model))
    beside = adapted(model, tmp_path, tokens(25, seed=1))
    plain = alone(model, tokens(25, seed=1))
    merge(model, load_adapter(tmp_path, model))
    merged = alone(model, tokens(25, seed=1))
    assert (beside - merged).abs().mean() < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (plain - merged).abs().mean() > 0.1


def test_zero_additions_change_no_bit(tmp_path: Path) -> None:
    """The unfused path has the rounding points of the fused one."""
    model = small_model(dtype=torch.bfloat16)
    save_adapter(tmp_path, model, [t for t in every_target(model) if not t.endswith("kv_b_proj")], lora_alpha=0)
    with glm5sdk.use("cpu") if "cpu" in glm5sdk.backends() else glm5sdk.use("reference"):
        assert torch.equal(adapted(model, tmp_path, tokens(25, seed=1)), alone(model, tokens(25, seed=1)))


def test_rounding_points_of_a_linear() -> None:
    """A x, B(A x) and the sum are each rounded to bfloat16; the scale was rounded into B."""
    generator = torch.Generator().manual_seed(0)
    x, base, a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((3, 8), (3, 5), (2, 8), (5, 2)))
    got = LowRank(a, b)(x, base)
    for t in range(3):
        low = torch.tensor([sum(float(x[t, i]) * float(a[r, i]) for i in range(8)) for r in range(2)]).bfloat16()
        high = torch.tensor([sum(float(low[r]) * float(b[o, r]) for r in range(2)) for o in range(5)]).bfloat16()
        assert torch.equal(got[t], (base[t].float() + high.float()).bfloat16())


@torch.no_grad()
def test_cached_and_chunked_equal_whole(tmp_path: Path) -> None:
    model = small_model(dtype=torch.bfloat16)
    save_adapter(tmp_path, model, every_target(model))
    view = WeightView.of(model, "base").with_adapter("adapter", load_adapter(tmp_path, model))
    ids = tokens(20, seed=2)
    with view.active(model):
        want = alone(model, ids)
        for chunk in (1, 7):
            cache = model.make_cache(1, 20, page_size=3)
            got = [model(ids[None, i : i + chunk], cache=cache)[0] for i in range(0, 20, chunk)]
            assert torch.equal(torch.cat(got), want)


def test_beside_quantised_weights(tmp_path: Path) -> None:
    """The base may be quantised; the addition is not."""
    changes = dict(hidden_size=64, moe_intermediate_size=128, q_lora_rank=32)
    model = small_model(**changes)
    quantise_model(model, scheme("w8a8"), tokens(24, seed=1)[None], "rtn")
    targets = [t for t in linear_targets(model) if not t.endswith("kv_b_proj")] + expert_targets([2], [1])
    save_adapter(tmp_path, small_model(**changes), targets)
    got, plain = adapted(model, tmp_path, tokens(12, seed=1)), alone(model, tokens(12, seed=1))
    assert bool(got.isfinite().all()) and (got - plain).abs().mean() > 0.05
    with pytest.raises(ContractError, match="is quantised or not in memory"):
        merge(model, load_adapter(tmp_path, model))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    edit(tensors)
    save_file({k: t.clone() for k, t in tensors.items()}, str(folder / "adapter_model.safetensors"))


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


KEY = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be read"),
    "cut": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x09"), "cannot be read"),
    "method": (lambda f: edit_config(f, peft_type="IA3"), "peft_type .* is 'IA3'"),
    "dora": (lambda f: edit_config(f, use_dora=True), "use_dora .* is True"),
    "rank": (lambda f: edit_config(f, r=0), "r in .* is 0"),
    "other rank": (lambda f: edit_config(f, r=5), r"lora_A is torch.float32 \[3, 33\], needs floats \[5, 33\]"),
    "alpha": (lambda f: edit_config(f, lora_alpha="2"), "lora_alpha .* is '2'"),
    "pattern": (lambda f: edit_config(f, rank_pattern={"(": 1}), r"rank_pattern in .* needs regular expressions"),
    "pattern's rank": (lambda f: edit_config(f, rank_pattern={"o_proj": 2}), r"needs floats \[2, 33\]"),
    "pattern's alpha": (lambda f: edit_config(f, alpha_pattern={"x": None}), r"alpha_pattern 'x' in .* is None"),
    "fused": (
        lambda f: edit_tensors(
            f, lambda t: t.update({f"model.layers.1.mlp.experts.lora_{s}.weight": t[KEY] for s in "AB"})
        ),
        r"is for a matrix \[3, 33\], needs \[\[42, 52\], \[52, 21\]\]",
    ),
    "stranger": (lambda f: edit_tensors(f, lambda t: t.update(x=torch.ones(1))), "x in .* is unknown"),
    "half": (lambda f: edit_tensors(f, lambda t: t.pop(KEY)), "o_proj in .* has only lora_B"),
    "nan": (lambda f: edit_tensors(f, lambda t: t[KEY].view(-1)[3:4].fill_(math.nan)), "lora_A holds infinity or NaN"),
    "layer": (
        lambda f: edit_tensors(
            f, lambda t: t.update({f"model.layers.9.self_attn.o_proj.lora_{s}.weight": t[KEY] for s in "AB"})
        ),
        "layers.9.* is no matrix that an adapter can add to",
    ),
    "expert": (
        lambda f: edit_tensors(
            f, lambda t: t.update({f"model.layers.1.mlp.experts.6.up_proj.lora_{s}.weight": t[KEY] for s in "AB"})
        ),
        "is for expert 6, needs one below 6",
    ),
    "head": (
        lambda f: edit_tensors(f, lambda t: t.update({f"lm_head.lora_{s}.weight": t[KEY] for s in "AB"})),
        "lm_head in .* is no matrix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SPOILED)
def test_a_spoiled_folder_is_refused(tmp_path: Path, fault: str) -> None:
    model = small_model()
    save_adapter(tmp_path, model, ["model.layers.0.self_attn.o_proj"])
    assert load_adapter(tmp_path, model).name == tmp_path.name
    spoil, said = SPOILED[fault]
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        load_adapter(tmp_path, model)


def test_an_absorbed_adapter_is_not_stacked(tmp_path: Path) -> None:
    model = small_model()
    name = "model.layers.0.self_attn.kv_b_proj"
    save_adapter(tmp_path, model, [name])
    adapter = load_adapter(tmp_path, model)
    view = WeightView.of(model, "base").with_adapter("one", adapter)
    with pytest.raises(ContractError, match="merged into kv_b_proj"):
        view.with_adapter("two", adapter)
    with pytest.raises(ContractError, match="needs the view without the adapter"):
        view.replaced("new", {f"{name}.weight": model.get_submodule(name).weight.detach().clone()})


@torch.no_grad()
def test_mtp_layer_has_the_adapter(tmp_path: Path) -> None:
    model = small_model()
    save_adapter(tmp_path, model, ["model.layers.3.self_attn.o_proj"])
    view = WeightView.of(model, "base").with_adapter("adapter", load_adapter(tmp_path, model))
    ids, batch = tokens(9, seed=4), TokenBatch.packed([8])
    hidden = model.hidden_states(ids[:-1], model.context(batch))
    plain = model.mtp_hidden_states(ids[1:], hidden, model.context(batch))
    with view.active(model):
        assert torch.equal(model.hidden_states(ids[:-1], model.context(batch)), hidden)
        assert not torch.equal(model.mtp_hidden_states(ids[1:], hidden, model.context(batch)), plain)
