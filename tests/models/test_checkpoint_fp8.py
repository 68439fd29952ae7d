"""FP8 checkpoints with 128 by 128 block scales: partial blocks, values, and files as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_cases import empty_parameters, random_tensors, small
from safetensors.torch import load_file, save_file

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5 import Glm5Config, open_checkpoint, save_checkpoint
from glm5sdk.models.glm5.checkpoint import parameter_writer
from glm5sdk.models.glm5.checkpoint_fp8 import dequantise_blocks, quantise_blocks, quantised_tensors, scale_shape


@pytest.mark.parametrize("shape", [(576, 300), (128, 128), (129, 1), (1, 127), (5, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantise_against_a_plain_loop(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q = (100 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape(shape), generator=generator) + 0.5
    values, expected = q.double(), torch.empty(shape, dtype=torch.float64)
    for i in range(shape[0]):
        for j in range(0, shape[1], 128):
            expected[i, j : j + 128] = values[i, j : j + 128] * scales[i // 128, j // 128].double()
    # e4m3 has 4 significant bits and the scale 24: the product may round once in float32, once more to dtype.
    assert torch.equal(dequantise_blocks(q, scales, dtype), expected.float().to(dtype))


def test_576_rows_have_5_scale_rows() -> None:
    assert scale_shape((576, 6144)) == (5, 48)
    q, scales = quantise_blocks(torch.randn(576, 256, generator=torch.Generator().manual_seed(2)))
    assert q.dtype == torch.float8_e4m3fn
    assert scales.shape == (5, 2)
    with pytest.raises(CheckpointError, match=r"scale_inv is \[4, 2\], needs \[5, 2\] for a weight of \[576, 256\]"):
        dequantise_blocks(q, scales[:4], torch.float32)


def test_quantise_is_the_nearest_value_and_never_nan() -> None:
    w = torch.randn(200, 150, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 150)
    w[0, 0] = 0.0
    q, scales = quantise_blocks(w)
    back = dequantise_blocks(q, scales, torch.float32)
    assert not q.float().isnan().any()
    scale = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :150]
    # Half a step: 2^-4 of the value, or half the least subnormal, 2^-10.
    bound = torch.maximum(w.abs() * 2**-4, scale * 2**-10) * 1.0001
    assert bool(((back - w).abs() <= bound).all())


def fp8_checkpoint(path: Path, config: Glm5Config, max_shard_bytes: int = 5_000_000_000) -> dict[str, torch.Tensor]:
    """Saves an FP8 checkpoint and returns all its tensors, scales included."""
    tensors = dict(quantised_tensors(random_tensors(config, dtype=torch.bfloat16).items()))
    save_checkpoint(path, config, tensors.items(), max_shard_bytes)
    return tensors


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 30_000], ids=["one file", "scales in other shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_checkpoint_loads_dequantised(tmp_path: Path, shard_bytes: int, dtype: torch.dtype) -> None:
    config = small(kv_lora_rank=136, hidden_size=160)  # kv_a has 144 rows: two scale rows, the last partial
    tensors = fp8_checkpoint(tmp_path, config, shard_bytes)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert tensors[name + "_scale_inv"].shape == (2, 2)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.is_fp8
    params = empty_parameters(checkpoint, dtype)
    checkpoint.load_into(parameter_writer(params.__getitem__), dtype)
    assert not any(param.isnan().any() for param in params.values())
    assert torch.equal(params[name], dequantise_blocks(tensors[name], tensors[name + "_scale_inv"], dtype))
    up = "model.layers.2.mlp.experts.1.up_proj.weight"
    expected = dequantise_blocks(tensors[up], tensors[up + "_scale_inv"], dtype)
    assert torch.equal(params["model.layers.2.mlp.experts.gate_up_proj"][1, 24:], expected)
    assert torch.equal(params["model.layers.4.eh_proj.weight"], tensors["model.layers.4.eh_proj.weight"].to(dtype))


def test_fp8_config_says_what_the_files_hold(tmp_path: Path) -> None:
    config = small()
    fp8_checkpoint(tmp_path / "fp8", config)
    told = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert told["quant_method"] == "fp8"
    assert told["weight_block_size"] == [128, 128]
    kept = set(told["modules_to_not_convert"])
    assert {"lm_head", "model.layers.4.eh_proj", "model.layers.1.mlp.gate"} <= kept
    assert "model.layers.0.self_attn.indexer.weights_proj" in kept
    assert "model.layers.0.self_attn.q_a_proj" not in kept

    # Dequantised and saved again, the config no longer claims FP8.
    loaded = open_checkpoint(tmp_path / "fp8")
    assert "quantization_config" in loaded.config.extra
    plain = ((spec.name, tensor) for spec, tensor in loaded.tensors(torch.bfloat16))
    save_checkpoint(tmp_path / "plain", loaded.config, plain)
    written = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in written
    assert written["dtype"] == "bfloat16"
    assert not open_checkpoint(tmp_path / "plain").is_fp8


def test_scales_and_weights_are_saved_together_or_not_at_all(tmp_path: Path) -> None:
    config = small()
    name = "model.layers.0.self_attn.q_a_proj.weight"
    tensors = dict(quantised_tensors(random_tensors(config).items()))
    without = {key: value for key, value in tensors.items() if key != name + "_scale_inv"}
    with pytest.raises(CheckpointError, match=f"{name} is torch.float8_e4m3fn, needs _scale_inv"):
        save_checkpoint(tmp_path / "x", config, without.items())
    with pytest.raises(CheckpointError, match=f"{name} is torch.float32, needs _scale_inv"):
        save_checkpoint(tmp_path / "x", config, {**tensors, name: torch.zeros(40, 64)}.items())
    assert not (tmp_path / "x").exists()


def test_one_scale_dropped_from_a_good_file(tmp_path: Path) -> None:
    """A reader that skips unknown or absent scales loads nonsense; here nothing loads."""
    fp8_checkpoint(tmp_path, small())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.4.mlp.experts.0.down_proj.weight"
    tensors[name.replace("weight", "weight_scale")] = tensors.pop(name + "_scale_inv")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="experts.0.down_proj.weight_scale in .* unknown kind"):
        open_checkpoint(tmp_path)
