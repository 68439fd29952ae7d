"""Between a Hugging Face config.json and the fields of Glm5Config: aliases, defaults, and what is written back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5.config_checks import MODEL_TYPES, refuse
from glm5sdk.models.glm5.rope import YarnScaling

if TYPE_CHECKING:
    from glm5sdk.models.glm5.config import Glm5Config

SDK_TABLE = "glm5sdk"
_SDK_FIELDS = ("latent_norm_eps", "router_temperature", "sparse_pattern", "sparse_window", "sparse_stride")

_ARCHITECTURES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}

# What a file that leaves a key out means by it, where that is not Glm5Config's own default.
_ABSENT: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"num_nextn_predict_layers": 0},
    "deepseek_v32": {
        **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128},
        **{"n_group": 8, "topk_group": 4, "index_n_heads": 64, "max_position_embeddings": 163840},
        **{"rms_norm_eps": 1e-6, "latent_norm_eps": 1e-6, "indexer_rope_interleave": False},
        "num_nextn_predict_layers": 0,
    },
}
# null means "not given" for these; for any other field it is refused.
_NULL_IS_ABSENT = frozenset(
    {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "indexer_types", "mlp_layer_types"}
    | {"moe_router_dtype", "swiglu_limit", "num_nextn_predict_layers", "n_group", "topk_group", "dtype"}
)
# Written only when set, so that a GLM-5 config gains no GLM-5.2 key.
_WRITTEN_IF_SET = frozenset(
    {"indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "mlp_layer_types"}
    | {"moe_router_dtype", "swiglu_limit", "index_share_for_mtp_iteration"}
)
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")


def read_config_file(path: str | PathLike[str]) -> dict[str, Any]:
    """The JSON object in `<path>/config.json`."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"config: {file} is missing, needs a local checkpoint directory with a config.json; "
            "this SDK downloads nothing, so fetch a hub model first"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"config: {file} is not JSON ({error}), needs a config.json") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"config: {file} is a {type(values).__name__}, needs a JSON object")
    return values


def fields_from_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for Glm5Config; keys it does not know go to `extra`."""
    rest = dict(values)
    model_type = rest.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        hint = (
            "GLM-5.3-Flash is a different architecture (linear attention, vision)"
            if model_type == "glm5_next"
            else "Glm5Config reads GLM-5, 5.1, 5.2, 5.3 and DeepSeek-V3.2"
        )
        raise refuse("model_type", model_type, "one of " + ", ".join(MODEL_TYPES), hint)
    fields: dict[str, Any] = {"model_type": model_type, **_ABSENT[model_type]}
    fields.update(_rope(rest))
    _experts_alias(rest)
    _dtype_alias(rest)
    fields.update(_sdk_table(rest))
    for name in _hf_fields():
        if name not in rest:
            continue
        value = rest.pop(name)
        if value is None and name in _NULL_IS_ABSENT:
            continue
        fields[name] = value
    _take_repeats(rest, fields)
    fields["extra"] = rest
    return fields


def dict_from_config(config: Glm5Config) -> dict[str, Any]:
    """The config.json contents, sorted by key."""
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "num_key_value_heads": config.num_attention_heads,
        "qk_head_dim": config.qk_head_dim,
    }
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name in _hf_fields():
        value = getattr(config, name)
        if name in _WRITTEN_IF_SET and value == defaults[name]:
            continue
        values[name] = list(value) if isinstance(value, tuple) else value
    values["eos_token_id"] = _eos_for_json(config.eos_token_id)
    if config.rope_scaling is None:
        rope: dict[str, Any] = {"rope_type": "default"}
    else:
        rope = config.rope_scaling.to_dict()
    values["rope_parameters"] = {"rope_theta": config.rope_theta, **rope}
    absent = {**defaults, **_ABSENT[config.model_type]}
    own = {name: getattr(config, name) for name in _SDK_FIELDS if getattr(config, name) != absent[name]}
    if own:
        values[SDK_TABLE] = own
    values.update(config.extra)
    return dict(sorted(values.items()))


def _hf_fields() -> list[str]:
    """The fields that stand in config.json under their own name."""
    from glm5sdk.models.glm5.config import Glm5Config

    apart = {"model_type", "rope_theta", "rope_scaling", "extra", *_SDK_FIELDS}
    return [f.name for f in dataclasses.fields(Glm5Config) if f.name not in apart]


def _eos_for_json(tokens: tuple[int, ...]) -> int | list[int] | None:
    if not tokens:
        return None
    return tokens[0] if len(tokens) == 1 else list(tokens)


def _rope(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes the rope keys: theta at top level or in either table, which of the two being a matter of age."""
    top = rest.pop("rope_theta", None)
    both: dict[str, Any] = {name: rest.pop(name, None) for name in ("rope_parameters", "rope_scaling")}
    tables = {name: table for name, table in both.items() if table is not None}
    thetas = {} if top is None else {"rope_theta": top}
    kinds: dict[str, str] = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise refuse(name, table, "a table or null")
        if table.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = table["rope_theta"]
        kinds[name] = str(table.get("rope_type", table.get("type", "default")))
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            raise refuse(f"{name}.partial_rotary_factor", table["partial_rotary_factor"], "1 or nothing")
        if kinds[name] not in ("default", "yarn"):
            raise refuse(f"{name} type", kinds[name], "'default' or 'yarn'")
    if not thetas:
        raise ContractError(
            "Glm5Config: rope_theta is absent, needs a value at top level, in rope_parameters or in rope_scaling; "
            "guessing it gives a model that only fails at long context (GLM-5 1e6, GLM-5.2 8e6, DeepSeek-V3.2 1e4)"
        )
    if len(set(thetas.values())) > 1:
        raise refuse("rope_theta", thetas, "one value", "remove the stale ones")
    scalings = {YarnScaling.from_dict(tables[name]) for name, kind in kinds.items() if kind == "yarn"}
    if len(scalings) > 1 or (scalings and "default" in kinds.values()):
        raise refuse("rope_scaling", tables, "to agree with rope_parameters", "remove the stale one")
    return {"rope_theta": next(iter(thetas.values())), "rope_scaling": scalings.pop() if scalings else None}


def _experts_alias(rest: dict[str, Any]) -> None:
    """`num_experts` and `num_local_experts` are other spellings of n_routed_experts."""
    for alias in ("num_experts", "num_local_experts"):
        value = rest.pop(alias, None)
        if value is None:
            continue
        if rest.setdefault("n_routed_experts", value) != value:
            raise refuse(alias, value, f"to equal n_routed_experts ({rest['n_routed_experts']})")


def _dtype_alias(rest: dict[str, Any]) -> None:
    """`torch_dtype` is the older spelling of dtype, sometimes with a `torch.` prefix."""
    old = rest.pop("torch_dtype", None)
    value = rest.get("dtype") if rest.get("dtype") is not None else old
    if value is not None:
        rest["dtype"] = str(value).removeprefix("torch.")


def _take_repeats(rest: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Takes keys that only repeat other fields, checking that they do, and refuses what these models do not have.

    `head_dim` is taken unread: published files say 64 or 192 there for the same model.
    """
    from glm5sdk.models.glm5.config import Glm5Config

    model_type = fields["model_type"]
    if rest.get("architectures") in (None, [_ARCHITECTURES[model_type]]):
        rest.pop("architectures", None)
    for name, allowed in {"mlp_bias": False, "moe_layer_freq": 1}.items():
        if rest.get(name) not in (None, allowed):
            raise refuse(name, rest[name], f"{allowed!r}")
    layer_types = rest.pop("layer_types", None)
    for i, entry in enumerate(layer_types or ()):
        if entry not in _LAYER_TYPES:
            raise refuse(f"layer_types entry {i}", entry, "one of " + ", ".join(_LAYER_TYPES))
    rest.pop("head_dim", None)
    known = {**{f.name: f.default for f in dataclasses.fields(Glm5Config)}, **fields}
    for name, parts in {
        "num_key_value_heads": ("num_attention_heads",),
        "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    }.items():
        value = rest.pop(name, None)
        numbers = [known[part] for part in parts]
        if value is not None and all(isinstance(n, int) for n in numbers) and value != sum(numbers):
            raise refuse(name, value, f"{sum(numbers)}, which is {' + '.join(parts)}")


def _sdk_table(rest: dict[str, Any]) -> dict[str, Any]:
    table = rest.pop(SDK_TABLE, None) or {}
    unknown = sorted(set(table) - set(_SDK_FIELDS))
    if unknown:
        raise refuse(f"{SDK_TABLE} table key", unknown, "keys among " + ", ".join(_SDK_FIELDS))
    return dict(table)
