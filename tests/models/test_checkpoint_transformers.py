"""Checkpoints of transformers load here, and ours load there: names, shapes, values, configs and rope."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from checkpoint_cases import empty_parameters, small
from torch import Tensor

from glm5sdk.models.glm5 import Glm5Config, expected_tensors, open_checkpoint, preset, save_checkpoint
from glm5sdk.models.glm5.checkpoint import CheckpointWarning, parameter_writer
from glm5sdk.models.glm5.checkpoint_save import checkpoint_tensors

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings are not ours
transformers = pytest.importorskip("transformers")

CASES = {
    "glm all full": small(index_topk_freq=1, num_nextn_predict_layers=0),
    "glm shared": small(num_nextn_predict_layers=0, n_shared_experts=2),
    "deepseek": small(
        **{"model_type": "deepseek_v32", "index_topk_freq": 1, "indexer_rope_interleave": False},
        **{"rms_norm_eps": 1e-6, "latent_norm_eps": 1e-6, "n_group": 2, "num_nextn_predict_layers": 0},
    ),
    "tied": small(index_topk_freq=1, num_nextn_predict_layers=0, tie_word_embeddings=True),
}


def hf_model(config: Glm5Config, seed: int = 0) -> Any:
    values = config.to_dict()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(7 + 1e-3 * torch.randn(buffer.shape))
    return model


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_what_transformers_saves_is_what_we_expect(tmp_path: Path, config: Glm5Config) -> None:
    model = hf_model(config)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.replace(extra={}, indexer_types=None, mlp_layer_types=None, eos_token_id=()) == config

    params = empty_parameters(checkpoint)
    checkpoint.load_into(parameter_writer(params.__getitem__), torch.float32)
    # transformers fuses experts in memory as we do, so its state_dict is the oracle for every parameter.
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert params.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(params[name], value), name


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000])
def test_what_we_save_transformers_loads(tmp_path: Path, config: Glm5Config, shard_bytes: int) -> None:
    state = hf_model(config, seed=1).state_dict()
    save_checkpoint(tmp_path, config, checkpoint_tensors(config, state.__getitem__), shard_bytes)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    loaded = model.state_dict()
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name


def test_names_with_mtp_add_one_layer_to_transformers(tmp_path: Path) -> None:
    config = small()
    ours = {spec.name for spec in expected_tensors(config)}
    hf_model(config).save_pretrained(tmp_path)
    with pytest.warns(CheckpointWarning, match="loaded without MTP, as after a save by transformers"):
        checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.num_nextn_predict_layers == 0
    theirs = {spec.name for spec, _ in checkpoint.tensors(torch.float32)}
    assert ours - theirs == {name for name in ours if name.startswith("model.layers.4.")}


def test_bfloat16_save_by_transformers_keeps_the_router_bias(tmp_path: Path) -> None:
    config = CASES["glm shared"]
    hf_model(config).save_pretrained(tmp_path / "f32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "f32", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    params: dict[str, Tensor] = {}
    open_checkpoint(tmp_path / "bf16").load_into(lambda name, index, t: params.update({name: t}), torch.bfloat16)
    bias = params["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, model.state_dict()["model.layers.2.mlp.gate.e_score_correction_bias"])


@pytest.mark.parametrize("name", ["glm-5", "glm-5.2"])
def test_transformers_reads_our_config(name: str) -> None:
    config = preset(name)
    theirs = transformers.AutoConfig.for_model(**config.to_dict())
    assert tuple(theirs.indexer_types) == config.indexer_schedule[:78]
    assert [kind == "sparse" for kind in theirs.mlp_layer_types] == [config.is_moe(i) for i in range(78)]
    assert theirs.qk_head_dim == config.qk_head_dim
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    again = Glm5Config.from_dict(theirs.to_dict())
    assert again.indexer_schedule == config.indexer_schedule
    fields = {"extra": {}, "indexer_types": None, "mlp_layer_types": None, "bos_token_id": None}
    assert again.replace(**fields) == config.replace(**fields)


@pytest.mark.parametrize(
    "yarn",
    [
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
        {"factor": 8.0},
        {"factor": 8.0, "attention_factor": 1.25, "truncate": False},
        {"factor": 8.0, "original_max_position_embeddings": 64},  # the ramp would begin below pair 0
        {"factor": 8.0, "original_max_position_embeddings": 6},  # and has no width
    ],
    ids=str,
)
def test_yarn_against_transformers(yarn: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import yarn_apply_mscale

    rope = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "rope_theta": 10000.0, **yarn}
    values = {**CASES["deepseek"].to_dict(), "rope_parameters": rope, "qk_rope_head_dim": 64, "index_head_dim": 64}
    del values["qk_head_dim"]
    config = Glm5Config.from_dict(values)
    theirs = transformers.AutoConfig.for_model(**config.to_dict())
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, None)
    torch.testing.assert_close(torch.tensor(config.inverse_frequencies()), frequencies, rtol=2e-6, atol=0)
    assert config.rope_cos_sin_factor == pytest.approx(factor, rel=1e-12)
    scale = yarn_apply_mscale(theirs.rope_parameters, config.qk_head_dim**-0.5)
    assert config.softmax_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("theta", [10000.0, 8_000_000.0])
def test_default_rope_against_transformers(theta: float) -> None:
    config = CASES["glm shared"].replace(qk_rope_head_dim=64, index_head_dim=64, rope_theta=theta)
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

    theirs = transformers.AutoConfig.for_model(**config.to_dict())
    frequencies, factor = GlmMoeDsaRotaryEmbedding.compute_default_rope_parameters(theirs)
    torch.testing.assert_close(torch.tensor(config.inverse_frequencies()), frequencies, rtol=2e-6, atol=0)
    assert factor == config.rope_cos_sin_factor == 1.0
