"""Glm5Config: what it derives, and every contradiction it refuses when it is made."""

from __future__ import annotations

import pickle

import pytest
from checkpoint_cases import small

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5Config, YarnScaling, preset


def test_defaults_are_glm5() -> None:
    config = Glm5Config()
    assert config.qk_head_dim == 256
    assert config.kv_width == 576
    assert config.softmax_scale == 1 / 16
    assert config.num_layers == 79
    assert [config.is_moe(i) for i in (0, 2, 3, 77, 78)] == [False, False, True, True, True]
    assert config.indexer_schedule == ("full",) * 79
    assert config.latent_norm_eps == 1e-5
    assert config.hf_compat().latent_norm_eps == 1e-6
    assert config.num_selected_keys == 2048
    assert config.has_router_bias


def test_glm52_schedule_has_21_full_layers_and_the_mtp_layer() -> None:
    config = preset("glm-5.2")
    full = [i for i, kind in enumerate(config.indexer_schedule) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 78, 4), 78]
    assert len(full) == 21 + 1
    assert config.indexer_sources[:8] == (0, 1, 2, 2, 2, 2, 6, 6)
    assert config.indexer_sources[77:] == (74, 78)
    assert config.has_indexer(6)
    assert not config.has_indexer(7)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"index_topk_freq": 1}, "FFFF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, "FFSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSF"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"index_topk_pattern": ["full", "shared", "shared", "full"]}, "FSSF"),
        ({"index_topk_pattern": "FSFS", "indexer_types": ["full", "full", "shared", "shared"]}, "FFSS"),
    ],
)
def test_schedule_explicit_list_then_pattern_then_rule(given: dict, expected: str) -> None:
    config = small(**given)
    assert "".join(kind[0].upper() for kind in config.indexer_schedule) == expected + "F"


def test_config_is_a_value() -> None:
    config = small()
    assert config == small()
    assert hash(config) == hash(small())
    assert config.indexer_schedule  # cached, and must not disturb equality or pickling
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.replace(index_topk=4) != config
    with pytest.raises(AttributeError):
        config.index_topk = 4  # type: ignore[misc]


def test_replace_checks_again() -> None:
    with pytest.raises(ContractError, match="indexer_types has 4 entries, needs 2"):
        small(indexer_types=("full",) * 4).replace(num_hidden_layers=2)
    assert small(indexer_types=("full",) * 4).replace(num_hidden_layers=2, indexer_types=None).num_layers == 3


def test_mlp_layer_types_win_over_first_k_dense_replace() -> None:
    config = small(mlp_layer_types=["sparse", "dense", "sparse", "dense"], first_k_dense_replace=3)
    assert [config.is_moe(i) for i in range(5)] == [True, False, True, False, True]


def test_window_stride_has_no_indexer() -> None:
    config = preset("seed-b")
    assert config.indexer_schedule == ()
    assert not any(config.has_indexer(i) for i in range(config.num_layers))
    assert config.num_selected_keys == 512 + 8192 // 64
    assert not config.has_router_bias


@pytest.mark.parametrize(
    "change, message",
    [
        # what is not supported
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": "glm5_next"}, "glm5_next"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, needs 0 or 1"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"sparse_pattern": "blocks"}, "sparse_pattern"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        # types and signs
        ({"hidden_size": 64.0}, "hidden_size is 64.0, needs a positive integer"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"router_temperature": -1.0}, "router_temperature"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, needs true or false"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"pad_token_id": 1.5}, "pad_token_id"),
        ({"indexer_types": "full"}, "indexer_types is 'full', needs a list"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"extra": {"hidden_size": 3}}, "extra is \\['hidden_size'\\]"),
        # rope
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, needs an even"),
        ({"index_head_dim": 4}, "index_head_dim is 4, needs at least qk_rope_head_dim"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        # groups and experts
        ({"n_group": 3}, "n_group is 3, needs a divisor"),
        ({"n_group": 4}, "n_group is 4, needs at least 2 experts per group"),
        ({"n_group": 2, "topk_group": 3}, "topk_group is 3, needs at most n_group"),
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, needs at most 2"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, needs at most 4"),
        # layers and schedules
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is '1 entries', needs 4"),
        ({"mlp_layer_types": ["dense", "moe", "dense", "dense"]}, "mlp_layer_types entry 1 is 'moe'"),
        ({"index_topk_pattern": "FFS"}, "index_topk_pattern has 3 entries, needs 4"),
        ({"index_topk_pattern": "FFSFF"}, "index_topk_pattern has 5 entries, needs 4"),
        ({"index_topk_pattern": "FFXS"}, "index_topk_pattern entry 2 is 'X'"),
        ({"index_topk_pattern": "SFFF"}, "first layer is full"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_skip_topk_offset is 0, .*first layer is full"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"indexer_types": ["full"] * 3}, "indexer_types has 3 entries, needs 4"),
        ({"indexer_types": ["full", "none", "full", "full"]}, "indexer_types entry 1 is 'none'"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "first layer is full"),
        ({"model_type": "deepseek_v32"}, "shared on layer 2"),
    ],
)
def test_contradictions_are_refused_when_made(change: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        small(**change)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"factor": 0.5, "original_max_position_embeddings": 64}, "factor is 0.5"),
        ({"factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"factor": "4", "original_max_position_embeddings": 64}, "factor is '4'"),
        ({"factor": 4.0}, "original_max_position_embeddings"),
        ({"factor": 4.0, "original_max_position_embeddings": 64, "twist": 1}, "unknown keys \\['twist'\\]"),
    ],
)
def test_yarn_settings_are_checked(values: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        YarnScaling.from_dict({"type": "yarn", **values})


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ContractError, match="glm-5, glm-5.2, tiny, seed-a, seed-b"):
        preset("glm-6")


def test_tiny_preset_is_the_demo_model() -> None:
    config = preset("tiny", index_topk=16)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (192, 4, 2048)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (8, 2, 1)
    assert (config.index_topk, config.index_n_heads, config.max_position_embeddings) == (16, 16, 1024)
    assert config.num_nextn_predict_layers == 1
