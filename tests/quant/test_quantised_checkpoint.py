"""Checkpoints of quantised models: bit for bit there and back, readable by others' rules, refused when wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_cases import SCHEMES, quantised, random_model, saved, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5 import Glm5ForCausalLM, open_checkpoint, save_checkpoint
from glm5sdk.models.glm5.checkpoint_forms import form_parts, is_quantisable, to_tensors, to_weight
from glm5sdk.models.glm5.checkpoint_fp8 import quantised_tensors
from glm5sdk.nn.quantised import named_weights
from glm5sdk.ops._quant import unpack_int4
from glm5sdk.ops._weights import dequantize_weight, quantize_weight
from glm5sdk.registry import Weight

EXPERT = "model.layers.1.mlp.experts.0.gate_proj.weight"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_bit_for_bit(tmp_path: Path, name: str, dtype: str, method: str) -> None:
    model = saved(tmp_path / "a", name, method, dtype=getattr(torch, dtype))
    loaded = Glm5ForCausalLM.from_pretrained(tmp_path / "a", quantised=True)
    want = dict(named_weights(model))
    assert dict(named_weights(loaded)).keys() == want.keys()
    for key, weight in named_weights(loaded):
        assert (weight.kind, weight.layout, weight.shape) == (want[key].kind, "plain", want[key].shape)
        assert all(same_bits(a, b) for a, b in zip(weight.tensors, want[key].tensors, strict=True)), key
    with torch.no_grad():
        assert torch.equal(model(tokens()), loaded(tokens()))
    loaded.save_pretrained(tmp_path / "b")
    first, second = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(same_bits(first[key], second[key]) for key in first)
    assert config_of(tmp_path / "a") == config_of(tmp_path / "b")


@pytest.mark.parametrize("name", SCHEMES)
def test_shards_hold_the_same(tmp_path: Path, name: str) -> None:
    model, _ = quantised(name)
    model.save_pretrained(tmp_path, max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = Glm5ForCausalLM.from_pretrained(tmp_path, quantised=True)
    with torch.no_grad():
        assert torch.equal(model(tokens()), loaded(tokens()))


def test_integers_are_kept_by_default_and_fp8_is_dequantised(tmp_path: Path) -> None:
    for name, kinds in (("w8a8", {"w8a8"}), ("w4a8-experts", {"w8a8", "w4a8"}), ("fp8", set())):
        saved(tmp_path / name, name)
        assert Glm5ForCausalLM.from_pretrained(tmp_path / name).weight_kinds == kinds
        plain = Glm5ForCausalLM.from_pretrained(tmp_path / name, quantised=False)
        assert not plain.weight_kinds
        kept = Glm5ForCausalLM.from_pretrained(tmp_path / name, quantised=True)
        for key, weight in named_weights(kept):
            assert torch.equal(plain.get_parameter(key), dequantize_weight(weight)), key


def test_published_fp8_checkpoints_can_be_kept_as_they_are(tmp_path: Path) -> None:
    """kv_b_proj, which they quantise too, is dequantised all the same: it is absorbed."""
    model = random_model()
    model.save_pretrained(tmp_path / "float")
    stream = quantised_tensors(tensors_of(tmp_path / "float").items())
    save_checkpoint(tmp_path / "fp8", model.config, stream)
    assert open_checkpoint(tmp_path / "fp8").kinds["model.layers.0.self_attn.kv_b_proj.weight"] == "fp8"
    kept = Glm5ForCausalLM.from_pretrained(tmp_path / "fp8", quantised=True)
    default = Glm5ForCausalLM.from_pretrained(tmp_path / "fp8")
    assert (kept.weight_kinds, default.weight_kinds) == ({"fp8"}, frozenset())
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert torch.equal(kept.get_parameter(name), default.get_parameter(name))
    for key, weight in named_weights(kept):
        assert torch.equal(dequantize_weight(weight), default.get_parameter(key)), key


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 120, 128, 131, 160, 256])
def test_packed_words_are_offset_values_first_lowest(n: int) -> None:
    """Against a plain loop over values; and back."""
    w = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    weight = quantize_weight(w, "w4a8")
    stored = dict(to_tensors("a.weight", weight))
    q = unpack_int4(weight.tensors[0], n)
    assert stored["a.weight_packed"].dtype == torch.int32
    for row in range(3):
        for word in range(-(-n // 8)):
            want = sum((int(v) + 8) << 4 * i for i, v in enumerate(q[row, 8 * word : 8 * word + 8]))
            assert int(stored["a.weight_packed"][row, word]) & 0xFFFFFFFF == want
    assert stored["a.weight_shape"].tolist() == [3, n]
    back = to_weight("w4a8", "a.weight", (3, n), stored)
    assert all(same_bits(a, b) for a, b in zip(back.tensors, weight.tensors, strict=True))


def test_another_implementation_of_the_convention_reads_and_writes_the_same() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import pack_to_int32, unpack_from_int32

    weight = quantize_weight(torch.randn(5, 256, generator=torch.Generator().manual_seed(0)), "w4a8")
    stored, q = dict(to_tensors("a.weight", weight)), unpack_int4(weight.tensors[0], 256)
    assert torch.equal(stored["a.weight_packed"], pack_to_int32(q, 4))
    assert torch.equal(unpack_from_int32(stored["a.weight_packed"], 4, torch.Size((5, 256))), q)


def test_config_json_says_how_each_module_is_stored(tmp_path: Path) -> None:
    saved(tmp_path / "w8", "w8a8")
    saved(tmp_path / "w4", "w4a8-experts")
    saved(tmp_path / "fp8", "fp8")
    eight, four = (config_of(tmp_path / n)["quantization_config"] for n in ("w8", "w4"))
    assert (eight["quant_method"], eight["format"]) == ("compressed-tensors", "int-quantized")
    assert eight["config_groups"]["group_0"]["weights"] == {
        **{"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    }
    assert (four["format"], len(four["config_groups"])) == ("mixed-precision", 2)
    assert four["config_groups"]["group_0"]["weights"]["group_size"] == 128
    assert four["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    for skipped in (
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.3.eh_proj",
        "model.layers.2.self_attn.kv_b_proj",
    ):
        assert skipped in eight["ignore"] and skipped in four["ignore"]
    assert "model.embed_tokens" not in eight["ignore"]  # no linear
    assert config_of(tmp_path / "fp8")["quantization_config"]["weight_block_size"] == [128, 128]
    stored = tensors_of(tmp_path / "w4")
    for name, tensor in stored.items():
        if name.endswith(".weight") and not is_quantisable(name, tuple(tensor.shape)):
            assert tensor.dtype == torch.float32
    assert stored[Q_A].dtype == torch.int8 and stored[Q_A + "_scale"].shape == (40, 1)
    assert EXPERT not in stored and stored[EXPERT + "_scale"].shape == (128, 2)


def test_scales_of_a_shorter_dtype_are_read_exactly(tmp_path: Path) -> None:
    saved(tmp_path, "w8a8")
    stored = tensors_of(tmp_path)
    stored[Q_A + "_scale"] = stored[Q_A + "_scale"].bfloat16()
    save_file(stored, tmp_path / "model.safetensors")
    loaded = Glm5ForCausalLM.from_pretrained(tmp_path)
    scale = loaded.model.layers[0].self_attn.q_a_proj.weight.tensors[1]
    assert torch.equal(scale, stored[Q_A + "_scale"][:, 0].float())


Edit = Callable[[dict[str, Tensor]], Any]


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t.pop(EXPERT + "_scale"), f"{EXPERT}_packed .* is I32 without scales, needs {EXPERT}_scale"),
        (lambda t: t.pop(EXPERT + "_shape"), f"needs {EXPERT}_shape"),
        (lambda t: t.pop(Q_A + "_scale"), f"{Q_A} .* is I8 without scales, needs {Q_A}_scale"),
        (lambda t: t.update({EXPERT + "_scale": torch.ones(128, 5)}), r"is F32 \[128, 5\], needs .* \[128, 2\]"),
        (
            lambda t: t.update({EXPERT + "_shape": torch.tensor([160, 128])}),
            r"_shape is \[160, 128\], needs \[128, 160\]",
        ),
        (lambda t: t.update({Q_A: t[Q_A].float()}), "is a scale of an unknown kind"),
        (lambda t: t.update({Q_A + "_zero_point": torch.zeros(40, 1)}), "is a scale of an unknown kind"),
        (lambda t: t.update({EXPERT + "_g_idx": torch.zeros(160)}), "is a scale of an unknown kind"),
        (lambda t: t.update({EXPERT: torch.zeros(128, 160)}), "is a scale of an unknown kind"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(160, dtype=torch.int8)}),
            "model.norm.weight is quantised .w8a8., needs F32: only matrices",
        ),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    saved(tmp_path, "w4a8-experts")
    stored = tensors_of(tmp_path)
    edit(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Glm5ForCausalLM.from_pretrained(tmp_path)


def test_experts_of_two_kinds_load_dequantised_only(tmp_path: Path) -> None:
    model = saved(tmp_path, "w4a8-experts")
    stored = tensors_of(tmp_path)
    w = dequantize_weight(model.model.layers[1].mlp.experts.gate_up_proj)[0, :128]
    for suffix in ("_packed", "_shape"):
        del stored[EXPERT + suffix]
    stored.update(to_tensors(EXPERT, quantize_weight(w, "w8a8")))
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="experts of model.layers.1.mlp.experts.gate_up_proj are w4a8, w8a8"):
        Glm5ForCausalLM.from_pretrained(tmp_path)
    plain = Glm5ForCausalLM.from_pretrained(tmp_path, quantised=False)
    assert (plain.model.layers[1].mlp.experts.gate_up_proj[0, :128] - w).abs().max() <= w.abs().max() / 120


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False},
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True},
    ],
)
def test_weights_meant_for_other_activations_load_dequantised_only(tmp_path: Path, inputs: Any) -> None:
    saved(tmp_path, "w8a8")
    values = config_of(tmp_path)
    values["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="input_activations of quantization_config group 'group_0' is"):
        Glm5ForCausalLM.from_pretrained(tmp_path)
    assert not Glm5ForCausalLM.from_pretrained(tmp_path, quantised=False).weight_kinds


def test_fp8_experts_that_share_blocks_load_dequantised_only(tmp_path: Path) -> None:
    model = random_model(moe_intermediate_size=64)
    model.save_pretrained(tmp_path / "float")
    save_checkpoint(tmp_path / "fp8", model.config, quantised_tensors(tensors_of(tmp_path / "float").items()))
    with pytest.raises(CheckpointError, match="moe_intermediate_size is 64, needs a multiple of 128 to keep FP8"):
        Glm5ForCausalLM.from_pretrained(tmp_path / "fp8", quantised=True)
    assert not Glm5ForCausalLM.from_pretrained(tmp_path / "fp8").weight_kinds


@pytest.mark.parametrize("kind", ["w8a8", "w4a8", "fp8"])
def test_saving_wants_all_tensors_of_a_form(tmp_path: Path, kind: str) -> None:
    """Each in turn left out, and a scale beside a float weight."""
    model = random_model()
    model.save_pretrained(tmp_path / "float")
    plain = tensors_of(tmp_path / "float")
    form = dict(to_tensors(Q_A, quantize_weight(plain[Q_A], kind)))
    assert set(form) == set(form_parts(kind, Q_A, (40, 160)))
    whole = {**{k: v for k, v in plain.items() if k != Q_A}, **form}
    save_checkpoint(tmp_path / "whole", model.config, whole.items())
    for name in form:
        with pytest.raises(CheckpointError, match=f"{Q_A}|1 tensors never came"):
            save_checkpoint(tmp_path / "bad", model.config, {k: v for k, v in whole.items() if k != name}.items())
        if name != Q_A:
            with pytest.raises(CheckpointError, match=f"{Q_A} is torch.float32, needs _s.* if and only if quantised|"):
                save_checkpoint(tmp_path / "bad", model.config, {**plain, name: form[name]}.items())
    assert not (tmp_path / "bad").exists()


def test_blocks_and_integers_do_not_mix(tmp_path: Path) -> None:
    model = random_model()
    attention = model.model.layers[0].self_attn
    from glm5sdk.nn.quantised import QuantisedLinear

    attention.q_a_proj = QuantisedLinear(quantize_weight(attention.q_a_proj.weight, "w8a8"))
    attention.q_b_proj = QuantisedLinear(quantize_weight(attention.q_b_proj.weight, "fp8"))
    with pytest.raises(CheckpointError, match="weights are fp8, w8a8, needs fp8 alone or integers alone"):
        model.save_pretrained(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_a_backends_layout_is_not_written(tmp_path: Path) -> None:
    weight = quantize_weight(torch.randn(4, 8), "w8a8")
    assert dict(to_tensors("a.weight", weight)).keys() == {"a.weight", "a.weight_scale"}
    packed = Weight("w8a8", "cpu.vnni", (4, 8), weight.tensors)
    with pytest.raises(CheckpointError, match="a.weight has layout 'cpu.vnni', needs plain"):
        list(to_tensors("a.weight", packed))
