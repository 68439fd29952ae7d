"""Opening and loading checkpoints: values, MTP, duplicates, router biases, and memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoint_cases import empty_parameters, random_tensors, saved, small
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5 import Glm5Config, expected_tensors, open_checkpoint, save_checkpoint
from glm5sdk.models.glm5.checkpoint import Checkpoint, CheckpointWarning, parameter_writer
from glm5sdk.models.glm5.checkpoint_save import checkpoint_tensors


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    params = empty_parameters(checkpoint, dtype)
    checkpoint.load_into(parameter_writer(params.__getitem__), dtype)
    assert not any(param.isnan().any() for param in params.values())
    return params


def assert_holds(params: dict[str, Tensor], config: Glm5Config, tensors: dict[str, Tensor]) -> None:
    """Every tensor lies where the fused layout says, by plain indexing written out here."""
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            prefix, e, part = found[1], int(found[2]), found[3]
            inner = config.moe_intermediate_size
            if part == "down":
                stored = params[f"{prefix}.down_proj"][e]
            else:
                rows = params[f"{prefix}.gate_up_proj"][e]
                stored = rows[:inner] if part == "gate" else rows[inner:]
        else:
            stored = params[name]
        assert torch.equal(stored, tensor.to(stored.dtype)), name


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000, 1], ids=["one file", "shards", "shard each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_arrives(tmp_path: Path, shard_bytes: int, dtype: torch.dtype) -> None:
    config = small()
    tensors = saved(tmp_path, config, max_shard_bytes=shard_bytes)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    assert not checkpoint.is_fp8
    assert checkpoint.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert_holds(load(checkpoint, dtype), config, tensors)


def test_a_file_can_be_opened_by_itself(tmp_path: Path) -> None:
    config = small()
    tensors = saved(tmp_path, config)
    assert_holds(load(open_checkpoint(tmp_path / "model.safetensors")), config, tensors)


def test_model_to_checkpoint_and_back(tmp_path: Path) -> None:
    config = small(n_shared_experts=2, n_group=2, topk_group=1)
    saved(tmp_path / "a", config)
    params = load(open_checkpoint(tmp_path / "a"))
    save_checkpoint(tmp_path / "b", config, checkpoint_tensors(config, params.__getitem__))
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_only_selects_tensors(tmp_path: Path) -> None:
    saved(tmp_path, small(), max_shard_bytes=60_000)
    checkpoint = open_checkpoint(tmp_path)
    names = [spec.name for spec, _ in checkpoint.tensors(torch.float32, only=lambda s: ".experts.1." in s.name)]
    assert len(names) == 3 * 4
    assert all(".experts.1." in name for name in names)


def test_writer_compares_shapes(tmp_path: Path) -> None:
    saved(tmp_path, small())
    checkpoint = open_checkpoint(tmp_path)
    params = empty_parameters(checkpoint)
    params["model.norm.weight"] = torch.zeros(1)  # copy_ alone would broadcast the other way round in silence
    with pytest.raises(CheckpointError, match=r"model.norm.weight is \[1\] at None, needs \[64\]"):
        checkpoint.load_into(parameter_writer(params.__getitem__), torch.float32)


# The router bias


def test_router_bias_keeps_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    config = small()
    tensors = saved(tmp_path, config)
    params = load(open_checkpoint(tmp_path), torch.bfloat16)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert params[name].dtype == torch.float32
    assert torch.equal(params[name], tensors[name])
    # What a shorter dtype would do: the experts' differences vanish.
    assert len(tensors[name].to(torch.bfloat16).unique()) < len(tensors[name].unique())


def test_router_bias_cannot_be_saved_rounded(tmp_path: Path) -> None:
    config = small()
    params = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(config).items()}
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias is torch.bfloat16, needs torch.float32"):
        save_checkpoint(tmp_path / "x", config, params.items())
    assert not (tmp_path / "x").exists()


def test_router_bias_stored_rounded_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, small())
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(CheckpointWarning, match="e_score_correction_bias.* is stored as BF16, needs F32"):
        load(open_checkpoint(tmp_path))


# The MTP layer


def test_mtp_wholly_absent_is_told_and_switched_off(tmp_path: Path) -> None:
    config = small()
    tensors = saved(tmp_path, config.replace(num_nextn_predict_layers=0))
    with pytest.warns(CheckpointWarning, match=r"no tensor of the MTP layer \(model.layers.4.\*\)") as told:
        checkpoint = open_checkpoint(tmp_path, config)
    assert len(told) == 1
    assert checkpoint.config == config.replace(num_nextn_predict_layers=0)
    assert_holds(load(checkpoint), checkpoint.config, tensors)


def test_mtp_partly_absent_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, small())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.4.shared_head.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 \(model.layers.4.shared_head.norm.weight\)"):
        open_checkpoint(tmp_path)


def test_mtp_tensors_a_config_does_not_announce(tmp_path: Path) -> None:
    config = small()
    saved(tmp_path, config)
    without = config.replace(num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"belong to layer 4, needs num_nextn_predict_layers=1 .*drop_mtp=True"):
        open_checkpoint(tmp_path, without)
    for given in (without, config):
        checkpoint = open_checkpoint(tmp_path, given, drop_mtp=True)
        assert checkpoint.config == without
        assert not any(name.startswith("model.layers.4.") for name in load(checkpoint))


def with_copies(config: Glm5Config, tensors: dict[str, Tensor], head_offset: float) -> dict[str, Tensor]:
    prefix = f"model.layers.{config.num_hidden_layers}."
    return {
        **tensors,
        prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        prefix + "shared_head.head.weight": tensors["lm_head.weight"] + head_offset,
    }


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000])
def test_mtp_copies_are_recognised(tmp_path: Path, shard_bytes: int) -> None:
    """As DeepSeek-V3.2 stores them: equal to the main model's, so no parameters of their own."""
    config = small()
    tensors = random_tensors(config)
    save_checkpoint(tmp_path, config, with_copies(config, tensors, 0.0).items(), shard_bytes)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.untied == frozenset()
    assert "model.layers.4.shared_head.head.weight" not in checkpoint.parameters()
    assert_holds(load(checkpoint), config, tensors)


def test_mtp_head_of_its_own_is_kept(tmp_path: Path) -> None:
    config = small()
    tensors = with_copies(config, random_tensors(config), 1.0)
    save_checkpoint(tmp_path / "a", config, tensors.items())
    checkpoint = open_checkpoint(tmp_path / "a")
    name = "model.layers.4.shared_head.head.weight"
    assert checkpoint.untied == {name}
    params = load(checkpoint)
    assert torch.equal(params[name], tensors[name])
    save_checkpoint(tmp_path / "b", config, checkpoint_tensors(config, params.__getitem__, untied=checkpoint.untied))
    assert open_checkpoint(tmp_path / "b").untied == {name}


def test_tied_embeddings(tmp_path: Path) -> None:
    config = small(tie_word_embeddings=True)
    tensors = saved(tmp_path / "without", config)
    assert "lm_head.weight" not in tensors
    assert_holds(load(open_checkpoint(tmp_path / "without")), config, tensors)

    copy = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    save_checkpoint(tmp_path / "copy", config, copy.items())
    assert_holds(load(open_checkpoint(tmp_path / "copy")), config, tensors)

    other = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_checkpoint(tmp_path / "other", config, other.items())
    written: list[str] = []
    with pytest.raises(CheckpointError, match="lm_head.weight .* differs from model.embed_tokens.weight"):
        open_checkpoint(tmp_path / "other").load_into(lambda name, *_: written.append(name), torch.float32)
    assert not written


# Memory


def anonymous_bytes() -> int:
    """Memory of this process that is neither a file's mapping nor shared."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        pytest.skip("this kernel does not say RssAnon")
    return int(found[1]) * 1024


def test_load_and_save_hold_no_second_copy(tmp_path: Path) -> None:
    """Some 180 MB of weights; beyond the parameters, both ways need a few tensors' worth."""
    config = small(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=12, vocab_size=2048)
    weights = sum(spec.numel * 2 for spec in expected_tensors(config) if spec.required)
    assert weights > 150_000_000
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2048 * 1024, generator=generator).to(torch.bfloat16)

    def tensors():  # type: ignore[no-untyped-def]
        for spec in expected_tensors(config):
            if spec.required:
                peak.append(anonymous_bytes())
                value = noise[: spec.numel].clone().view(spec.shape)
                yield spec.name, value.float() if spec.keep_f32 else value

    peak: list[int] = []
    before = anonymous_bytes()
    save_checkpoint(tmp_path, config, tensors(), max_shard_bytes=20_000_000)
    assert max(peak) - before < 60_000_000  # one shard of 20 MB and what the allocator keeps

    checkpoint = open_checkpoint(tmp_path)
    params = empty_parameters(checkpoint, torch.bfloat16)
    peak, before = [], anonymous_bytes()
    write = parameter_writer(params.__getitem__)

    def watching(name: str, index: object, tensor: Tensor) -> None:
        peak.append(anonymous_bytes())
        write(name, index, tensor)  # type: ignore[arg-type]

    checkpoint.load_into(watching, torch.bfloat16)
    assert max(peak) - before < 30_000_000
    assert torch.equal(params["model.layers.3.mlp.experts.down_proj"][7].flatten(), noise[: 1024 * 512])
