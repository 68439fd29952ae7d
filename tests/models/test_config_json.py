"""Glm5Config and config.json: the published files, their aliases, and what is written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import small

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5Config, preset, preset_names

# GLM-5's published config.json, key by key.
GLM5: dict[str, Any] = {
    **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16"},
    **{"vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 78, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_attention_heads": 64},
    **{"num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192},
    **{"qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "head_dim": 64, "n_routed_experts": 256},
    **{"n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"},
    **{"topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-05},
    **{"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False},
    **{"initializer_range": 0.02, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048},
    **{"indexer_rope_interleave": True, "rope_interleave": True, "max_position_embeddings": 202752},
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    **{"num_nextn_predict_layers": 1, "ep_size": 1, "pretraining_tp": 1, "use_cache": True},
    **{"eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820, "transformers_version": "5.2.0"},
}
GLM52: dict[str, Any] = {
    **GLM5,
    **{"head_dim": 192, "moe_router_dtype": "float32", "max_position_embeddings": 1048576},
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    **{"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None},
    "index_share_for_mtp_iteration": True,
    "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
}
DEEPSEEK_V32: dict[str, Any] = {
    **{"model_type": "deepseek_v32", "torch_dtype": "bfloat16", "rope_theta": 10000, "num_nextn_predict_layers": 1},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with keys changed; `...` removes one."""
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def test_published_glm5_is_the_preset() -> None:
    config = Glm5Config.from_dict(GLM5)
    assert config.replace(extra={}) == preset("glm-5")
    assert set(config.extra) == {"moe_layer_freq", "ep_size", "pretraining_tp", "use_cache", "transformers_version"}


def test_published_glm52_has_the_presets_schedule() -> None:
    config = Glm5Config.from_dict(GLM52)
    derived = config.replace(extra={}, indexer_types=None, mlp_layer_types=None)
    assert derived == preset("glm-5.2")
    assert derived.indexer_schedule == config.indexer_schedule
    assert [derived.is_moe(i) for i in range(79)] == [config.is_moe(i) for i in range(79)]


def test_published_deepseek_v32() -> None:
    config = Glm5Config.from_dict(DEEPSEEK_V32)
    assert not config.indexer_rope_interleave  # half-split there, interleaved in GLM
    assert config.latent_norm_eps == config.rms_norm_eps == 1e-6
    assert (config.n_group, config.topk_group, config.index_n_heads) == (8, 4, 64)
    assert config.rope_scaling is not None
    assert config.rope_cos_sin_factor == 1.0
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)


@pytest.mark.parametrize("base", [GLM5, GLM52, DEEPSEEK_V32], ids=["glm5", "glm52", "deepseek"])
def test_round_trip_keeps_every_key_that_means_something(base: dict[str, Any]) -> None:
    config = Glm5Config.from_dict({**base, "some_future_key": {"a": [1, 2]}})
    written = json.loads(json.dumps(config.to_dict()))
    assert Glm5Config.from_dict(written) == config
    assert written["some_future_key"] == {"a": [1, 2]}
    same = set(base) - {"head_dim", "torch_dtype", "index_topk_pattern", "rope_theta", "rope_scaling"}
    assert {key: written[key] for key in same} == {key: base[key] for key in same}
    assert "glm5sdk" not in written


@pytest.mark.parametrize("name", preset_names())
def test_presets_round_trip(name: str) -> None:
    config = preset(name)
    assert Glm5Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_own_settings_stand_in_a_table_of_their_own() -> None:
    config = small(latent_norm_eps=1e-6, router_temperature=0.5)
    written = config.to_dict()
    assert written["glm5sdk"] == {"latent_norm_eps": 1e-6, "router_temperature": 0.5}
    assert "latent_norm_eps" not in written
    assert Glm5Config.from_dict(written) == config
    with pytest.raises(ContractError, match="latent_eps"):
        Glm5Config.from_dict({**GLM5, "glm5sdk": {"latent_eps": 1e-6}})


def test_glm5_gains_no_key_of_glm52() -> None:
    written = preset("glm-5").to_dict()
    assert not {"indexer_types", "index_topk_freq", "moe_router_dtype", "index_share_for_mtp_iteration"} & set(written)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ..., "rope_theta": 1000000.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1000000.0},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": ..., "rope_scaling": {"type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1000000},  # in both places, equal
        {"n_routed_experts": ..., "num_experts": 256},
        {"num_local_experts": 256},
        {"dtype": ..., "torch_dtype": "torch.bfloat16"},
        {"layer_types": ["deepseek_sparse_attention"] * 78},
        {"layer_types": ["indexed_attention"] * 78},
        {"indexer_rope_interleave": ...},
        {"head_dim": 192},
        {"index_topk_freq": None, "index_skip_topk_offset": None},
        {"moe_router_dtype": None},
    ],
    ids=str,
)
def test_other_spellings_of_the_same_model(changes: dict[str, Any]) -> None:
    assert Glm5Config.from_dict(changed(GLM5, **changes)) == Glm5Config.from_dict(GLM5)


def test_one_eos_token_or_several() -> None:
    assert Glm5Config.from_dict({**GLM5, "eos_token_id": 5}).eos_token_id == (5,)
    assert Glm5Config.from_dict({**GLM5, "eos_token_id": None}).eos_token_id == ()
    assert Glm5Config.from_dict({**GLM5, "eos_token_id": 5}).to_dict()["eos_token_id"] == 5


def test_mtp_layer_is_not_assumed_when_the_file_is_silent() -> None:
    assert Glm5Config.from_dict(changed(GLM5, num_nextn_predict_layers=...)).num_nextn_predict_layers == 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "glm5_next"}, "GLM-5.3-Flash is a different architecture"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"model_type": ...}, "model_type is None"),
        ({"rope_parameters": ...}, "rope_theta is absent"),
        ({"rope_theta": 10000}, "rope_theta is .*needs one value"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3"}}, "'llama3', needs 'default' or 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 9}}, "rope_scaling"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"num_experts": 128}, "num_experts is 128, needs to equal n_routed_experts"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, needs 64"),
        ({"qk_head_dim": 192}, "qk_head_dim is 192, needs 256"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types entry 0 is 'full_attention'"),
        ({"hidden_size": "6144"}, "hidden_size is '6144'"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
    ],
    ids=str,
)
def test_files_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Glm5Config.from_dict(changed(GLM5, **changes))


def test_from_pretrained_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json is missing"):
        Glm5Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Glm5Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="needs a JSON object"):
        Glm5Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GLM5))
    assert Glm5Config.from_pretrained(tmp_path) == Glm5Config.from_dict(GLM5)
