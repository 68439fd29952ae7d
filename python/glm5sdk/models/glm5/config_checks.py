"""What makes a Glm5Config valid; every message names the field, its value and what is needed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.rope import YarnScaling

if TYPE_CHECKING:
    from glm5sdk.models.glm5.config import Glm5Config

MODEL_TYPES = ("glm_moe_dsa", "deepseek_v32")
DTYPES = ("bfloat16", "float16", "float32", "float64")

_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings", "sparse_window", "sparse_stride"),
)
_NOT_NEGATIVE = ("first_k_dense_replace", "n_shared_experts", "index_skip_topk_offset", "num_nextn_predict_layers")
_SIGNED_INTS = ("index_topk_freq",)
_OPTIONAL_IDS = ("bos_token_id", "pad_token_id")
_POSITIVE_FLOATS = (
    *("rms_norm_eps", "latent_norm_eps", "routed_scaling_factor", "router_temperature", "rope_theta"),
    "swiglu_limit",
)
_FLOATS = ("attention_dropout", "initializer_range")
_BOOLS = (
    *("attention_bias", "tie_word_embeddings", "norm_topk_prob", "indexer_rope_interleave", "rope_interleave"),
    "index_share_for_mtp_iteration",
)
_STRINGS = ("model_type", "hidden_act", "scoring_func", "topk_method", "sparse_pattern", "dtype")


def normalised(config: Glm5Config) -> dict[str, Any]:
    """The fields whose value is stored in another form: lists as tuples, whole-number floats as floats, one eos id."""
    changes: dict[str, Any] = {"extra": dict(config.extra)}
    for name in ("indexer_types", "mlp_layer_types", "index_topk_pattern"):
        value = getattr(config, name)
        if isinstance(value, list):
            changes[name] = tuple(value)
    for name in (*_POSITIVE_FLOATS, *_FLOATS):
        value = getattr(config, name)
        if isinstance(value, int) and not isinstance(value, bool):
            changes[name] = float(value)
    eos: Any = config.eos_token_id
    if eos is None:
        changes["eos_token_id"] = ()
    elif isinstance(eos, int) and not isinstance(eos, bool):
        changes["eos_token_id"] = (eos,)
    elif isinstance(eos, list):
        changes["eos_token_id"] = tuple(eos)
    return changes


def check(config: Glm5Config) -> None:
    """Raises ContractError on the first thing that is wrong, types first, then what belongs together."""
    clash = sorted(set(config.extra) & {*vars(config), "rope_parameters", "glm5sdk"})
    if clash:
        raise refuse("extra", clash, "only keys that are not fields")
    _check_types(config)
    _check_supported(config)
    _check_attention(config)
    _check_experts(config)
    _check_layers(config)


def refuse(name: str, got: object, want: str, hint: str = "") -> ContractError:
    """The error for one field, in the house's form."""
    return ContractError(f"Glm5Config: {name} is {got!r}, needs {want}" + (f"; {hint}" if hint else ""))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(config: Glm5Config) -> None:
    for name in _STRINGS:
        if not isinstance(getattr(config, name), str):
            raise refuse(name, getattr(config, name), "a string")
    for name in _BOOLS:
        if not isinstance(getattr(config, name), bool):
            raise refuse(name, getattr(config, name), "true or false")
    for names, least, want in (
        (_POSITIVE, 1, "a positive integer"),
        (_NOT_NEGATIVE, 0, "a non-negative integer"),
        (_SIGNED_INTS, -math.inf, "an integer"),
    ):
        for name in names:
            value = getattr(config, name)
            if not _is_int(value) or value < least:
                raise refuse(name, value, want)
    for name in (*_POSITIVE_FLOATS, *_FLOATS):
        value = getattr(config, name)
        if value is None and name == "swiglu_limit":
            continue
        if not isinstance(value, float) or not math.isfinite(value):
            raise refuse(name, value, "a finite number")
        if name in _POSITIVE_FLOATS and value <= 0.0:
            raise refuse(name, value, "a number above 0")
    for name in ("indexer_types", "mlp_layer_types", "index_topk_pattern"):
        value = getattr(config, name)
        plain = value is None or (name == "index_topk_pattern" and isinstance(value, str))
        if not plain and not (isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)):
            raise refuse(name, value, "a list of strings or null")
    if config.rope_scaling is not None and not isinstance(config.rope_scaling, YarnScaling):
        raise refuse("rope_scaling", config.rope_scaling, "a YarnScaling or None", "from_dict reads the JSON form")
    if config.moe_router_dtype is not None and not isinstance(config.moe_router_dtype, str):
        raise refuse("moe_router_dtype", config.moe_router_dtype, "a string or null")
    for name in _OPTIONAL_IDS:
        value = getattr(config, name)
        if value is not None and not _is_int(value):
            raise refuse(name, value, "a token id or null")
    if not isinstance(config.eos_token_id, tuple) or not all(_is_int(token) for token in config.eos_token_id):
        raise refuse("eos_token_id", config.eos_token_id, "one token id or a list of them")


def _check_supported(config: Glm5Config) -> None:
    if config.model_type not in MODEL_TYPES:
        hint = "GLM-5.3-Flash (glm5_next) is a different architecture" if "glm5_next" in config.model_type else ""
        raise refuse("model_type", config.model_type, "one of " + ", ".join(MODEL_TYPES), hint)
    if config.dtype not in DTYPES:
        raise refuse("dtype", config.dtype, "one of " + ", ".join(DTYPES))
    if config.hidden_act != "silu":
        raise refuse("hidden_act", config.hidden_act, "'silu'")
    if config.attention_bias:
        raise refuse("attention_bias", True, "False", "no GLM-5 or DeepSeek-V3.2 checkpoint has projection biases")
    if config.attention_dropout != 0.0:
        raise refuse("attention_dropout", config.attention_dropout, "0", "the sparse attention op has no dropout")
    if config.moe_router_dtype not in (None, "float32", "fp32"):
        raise refuse(
            "moe_router_dtype",
            config.moe_router_dtype,
            "'float32' or null",
            "the router always multiplies in float32: a lower precision picks other experts",
        )
    if config.num_nextn_predict_layers > 1:
        raise refuse(
            "num_nextn_predict_layers",
            config.num_nextn_predict_layers,
            "0 or 1",
            "GLM-5 drafts several tokens by running its one MTP layer repeatedly",
        )


def _check_attention(config: Glm5Config) -> None:
    if config.qk_rope_head_dim % 2:
        raise refuse("qk_rope_head_dim", config.qk_rope_head_dim, "an even number", "rope turns pairs")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise refuse(
            "index_head_dim",
            config.index_head_dim,
            f"at least qk_rope_head_dim ({config.qk_rope_head_dim})",
            "the first dims of an indexer head are rotated",
        )
    if config.rope_theta <= 1.0:
        raise refuse("rope_theta", config.rope_theta, "a number above 1")
    if config.sparse_pattern not in ("indexer", "window_stride"):
        raise refuse("sparse_pattern", config.sparse_pattern, "'indexer' or 'window_stride'")
    # Resolving raises on any fault of the schedule, here and not at the first forward.
    schedule = config.indexer_schedule
    if config.model_type == "deepseek_v32" and "shared" in schedule:
        raise refuse(
            "indexer_types",
            f"shared on layer {schedule.index('shared')}",
            "full on every layer",
            "deepseek_v32 has an indexer on each layer",
        )


def _check_experts(config: Glm5Config) -> None:
    if config.scoring_func not in ("sigmoid", "softmax"):
        raise refuse("scoring_func", config.scoring_func, "'sigmoid' or 'softmax'")
    if config.topk_method not in ("noaux_tc", "greedy"):
        raise refuse("topk_method", config.topk_method, "'noaux_tc' or 'greedy'")
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups:
        raise refuse("n_group", groups, f"a divisor of n_routed_experts ({experts})")
    if groups > 1 and experts // groups < 2:
        raise refuse(
            "n_group",
            groups,
            f"at least 2 experts per group, so at most {experts // 2} groups",
            "a group is scored by its two best experts",
        )
    if config.topk_group > groups:
        raise refuse("topk_group", config.topk_group, f"at most n_group ({groups})")
    reachable = experts // groups * config.topk_group
    if config.num_experts_per_tok > reachable:
        raise refuse(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"at most {reachable}, the experts in topk_group={config.topk_group} of n_group={groups} groups",
        )


def _check_layers(config: Glm5Config) -> None:
    types = config.mlp_layer_types
    if types is None:
        return
    if len(types) != config.num_hidden_layers:
        raise refuse(
            "mlp_layer_types",
            f"{len(types)} entries",
            f"{config.num_hidden_layers}, one per decoder layer",
            "set mlp_layer_types=None to follow first_k_dense_replace",
        )
    for i, entry in enumerate(types):
        if entry not in ("dense", "sparse"):
            raise refuse(f"mlp_layer_types entry {i}", entry, "'dense' or 'sparse'")
