"""Layers get their cache under a name that changes between versions: each known one is read, no other is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from glm_oracle import CACHE, cache_of, ids_of, make_model, with_cache
from transformers import DynamicCache
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from glm5sdk.core.errors import ContractError
from glm5sdk.integrations.transformers import accelerate
from glm5sdk.integrations.transformers.cache import KEYWORDS


def _rename(model: Any, name: str) -> None:
    """Let every attention module get the cache as `name`, as a version of transformers with that name would do."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {(name if key == CACHE else key): value for key, value in kwargs.items()}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("name", KEYWORDS)
def test_each_known_name(name: str) -> None:
    model, ids = make_model(), ids_of(2, 40)
    with torch.no_grad():
        want = model(ids).logits[:, 30:]
        accelerate(model)
        _rename(model, name)
        cache = cache_of(model(ids[:, :30]))
        assert cache.get_seq_length() == 30
        got = model(ids[:, 30:], **with_cache(cache)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_cache_by_another_name_is_not_lost() -> None:
    model = make_model()
    accelerate(model)
    _rename(model, "memory")
    with torch.no_grad(), pytest.raises(ContractError, match="passed as memory, needs one, as cache or past"):
        model(ids_of(1, 5))


def test_two_caches() -> None:
    model = make_model(num_hidden_layers=1)
    accelerate(model)
    both = {name: DynamicCache(config=model.config) for name in KEYWORDS}
    hidden = torch.zeros(1, 3, model.config.hidden_size)
    with torch.no_grad(), pytest.raises(ContractError, match="passed as cache, past_key_values, needs one"):
        model.model.layers[0].self_attn(hidden, **both)


@pytest.mark.parametrize("kind", [glm.GlmMoeDsaAttention, glm.GlmMoeDsaDecoderLayer])
def test_a_version_with_another_name(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Any, memory: Any = None, **kwargs: Any) -> None: ...

    model = make_model()
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(ContractError, match="hidden_states, memory, kwargs, needs cache or past_key_values"):
        accelerate(model)
    assert not [m for m in model.modules() if "forward" in m.__dict__]
