"""What accelerate does not compute it refuses, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from glm_oracle import cache_of, ids_of, make_model, with_cache
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.integrations.transformers import accelerate


class Wrapped(nn.Module):
    """As an adapter library wraps a Linear: it shows the base's weight and computes more."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 2


def _untouched(model: nn.Module) -> bool:
    return not [m for m in model.modules() if "forward" in m.__dict__]


def test_other_classes() -> None:
    twin = DeepseekV32ForCausalLM(
        DeepseekV32Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=8,
            q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=4, qk_nope_head_dim=4, n_group=1, topk_group=1,
            index_n_heads=2, index_head_dim=8, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip
    for model in (twin, nn.Linear(2, 2), make_model().model, None):
        with pytest.raises(ContractError, match="needs GlmMoeDsaForCausalLM itself"):
            accelerate(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
    ],
)
def test_configs_that_mean_something_else(changes: dict[str, Any], words: str) -> None:
    model = make_model(**changes)
    with pytest.raises(ContractError, match=words):
        accelerate(model)
    assert _untouched(model)


def _wrap(model: Any) -> None:
    model.model.layers[1].self_attn.q_b_proj = Wrapped(model.model.layers[1].self_attn.q_b_proj)


def _other_mlp(model: Any) -> None:
    model.model.layers[2].mlp = nn.Identity()


def _two_eps(model: Any) -> None:
    model.model.layers[2].self_attn.kv_a_layernorm.variance_epsilon = 1e-5


def _mixed(model: Any) -> None:
    model.model.layers[2].self_attn.bfloat16()


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: None)


class Packed(nn.Parameter):
    """As sharding and quantisation libraries make their own kinds of parameters."""


def _packed(model: Any) -> None:
    model.model.norm.weight = Packed(torch.ones(64))


def _scaled(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_wrap, "q_b_proj is Wrapped"),
        (_other_mlp, "mlp is Identity"),
        (_two_eps, "eps"),
        (_mixed, "parameters are .*float32"),
        (_packed, "of type .*Packed"),
        (_hooked, "hooks"),
        (_scaled, "scales scores"),
    ],
)
def test_changed_modules(change: Any, words: str) -> None:
    model = make_model()
    change(model)
    with pytest.raises(ContractError, match=words):
        accelerate(model)
    assert _untouched(model)
    assert model.config._experts_implementation != "glm5sdk"


@pytest.mark.parametrize(("change", "words"), [(_wrap, "q_b_proj is Wrapped"), (_two_eps, "eps"), (_hooked, "hooks")])
def test_modules_changed_later(change: Any, words: str) -> None:
    """An adapter put on an accelerated model must not be left out in silence."""
    model = make_model()
    accelerate(model)
    change(model)
    with torch.no_grad(), pytest.raises(ContractError, match=words):
        model(ids_of(1, 5))


def test_twice() -> None:
    model = make_model()
    with accelerate(model), pytest.raises(ContractError, match="is accelerated"):
        accelerate(model)


def test_attention_weights_are_never_there() -> None:
    model = make_model(attn="eager")
    accelerate(model)
    with pytest.raises(ContractError, match="output_attentions"):
        model(ids_of(1, 5), output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ContractError, match="output_attentions"):
        model(ids_of(1, 5))


def test_other_caches() -> None:
    model, ids = make_model(), ids_of(1, 5)
    accelerate(model)
    static = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        with pytest.raises(ContractError, match="StaticIndexedLayer"):
            model(ids, **with_cache(static))
        with pytest.raises(ContractError, match="make it with DynamicCache"):
            model(ids, **with_cache(DynamicCache()))


def test_a_cache_of_another_batch_or_dtype() -> None:
    model = make_model()
    accelerate(model)
    with torch.no_grad():
        cache = cache_of(model(ids_of(2, 5)))
        with pytest.raises(ContractError, match="batch is 2"):
            model(ids_of(3, 1), **with_cache(cache))
        model.bfloat16()
        with pytest.raises(ContractError, match="rows are torch.float32"):
            model(ids_of(2, 1), **with_cache(cache))


def test_a_restored_model_does_not_read_our_cache() -> None:
    model, ids = make_model(), ids_of(1, 5)
    with torch.no_grad():
        with accelerate(model):
            cache = cache_of(model(ids))
        with pytest.raises(ContractError, match="start a new cache"):
            model(ids, **with_cache(cache))


def test_gradients_through_cached_tokens() -> None:
    model, ids = make_model(), ids_of(1, 5)
    accelerate(model)
    cache = cache_of(model(ids))
    with pytest.raises(ContractError, match="needs torch.no_grad"):
        model(ids, **with_cache(cache))


def test_dropout() -> None:
    with pytest.raises(ContractError, match="attention_dropout"):
        accelerate(make_model(attention_dropout=0.5))
    model, ids = make_model(), ids_of(1, 5)
    accelerate(model)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model(ids)  # not while evaluating
    with pytest.raises(ContractError, match="needs 0 to train"):
        model.train()(ids)


@pytest.mark.parametrize("kind", ["window", "bias", "heads"])
def test_masks_of_another_form(kind: str) -> None:
    model, ids = make_model(), ids_of(1, 6)
    accelerate(model)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    if kind == "window":
        mask = mask & ~torch.ones(6, 6, dtype=torch.bool).tril(-3)
        mask[5, 0] = True
    mask = mask.expand(1, 2 if kind == "heads" else 1, 6, 6)
    if kind == "bias":
        mask = mask.float().log() * 2 - 0.5
    with torch.no_grad(), pytest.raises(ContractError, match="attention_mask"):
        model(ids, attention_mask={"indexed_attention": mask})


def test_longer_than_the_model() -> None:
    model = make_model(max_position_embeddings=16)
    accelerate(model)
    with torch.no_grad(), pytest.raises(CapacityError, match="max_position_embeddings 16"):
        model(ids_of(1, 17))


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("is_concatenated", False, "interleaved"),
        ("is_transposed", True, "transposed"),
        ("has_bias", True, "biases"),
        ("has_gate", False, "no gate"),
        ("_is_expert_parallel", True, "other ranks"),
        ("act_fn", nn.GELU(), "GELU"),
    ],
)
def test_experts_of_other_models(attribute: str, value: Any, words: str) -> None:
    """The entry in transformers' registry can be asked for by any model."""
    experts = make_model().model.layers[1].mlp.experts
    setattr(experts, attribute, value)
    ids = torch.zeros(2, 2, dtype=torch.int64) + torch.tensor([0, 1])
    with pytest.raises(ContractError, match=words):
        ALL_EXPERTS_FUNCTIONS["glm5sdk"](experts, torch.zeros(2, 64), ids, torch.ones(2, 2))
