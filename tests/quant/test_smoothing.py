"""Smoothing by powers of two: no bit of the float model changes, and int8 errors fall where outliers are."""

from __future__ import annotations

import pytest
import torch
from quant_cases import random_model, tokens

from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.quant import scheme
from glm5sdk.quant.capture import inputs_of, recorded
from glm5sdk.quant.folds import smooth
from glm5sdk.quant.model import _layers
from glm5sdk.quant.smooth import Consumer, powers


def with_outliers(dtype: torch.dtype) -> Glm5ForCausalLM:
    """A model with a few large channels in every norm and up projection."""
    model = random_model(dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter[::13] *= 30
            elif name.endswith("up_proj.weight"):
                parameter[::11] *= 20
            elif name.endswith("gate_up_proj"):
                parameter[:, 128::11] *= 20
            elif name.endswith("kv_b_proj.weight"):
                parameter[25::9] *= 20
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_float_model_keeps_its_bits(dtype: torch.dtype) -> None:
    model = with_outliers(dtype)
    ids = tokens()
    states = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        before = model(ids)
        for layer, run in _layers(model, ids):
            with recorded(layer) as calls:
                run()
            smooth(layer, calls, inputs_of(layer, calls), scheme("w8a8"))
        after = model(ids)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, states[name])}
    endings = ("o_proj.weight", "kv_b_proj.weight", "input_layernorm.weight", "gate_up_proj", "experts.down_proj")
    assert all(any(name.endswith(e) for name in changed) for e in endings), changed
    assert any("model.layers.3." in name for name in changed)  # the MTP layer
    assert torch.equal(before, after)


def test_recorded_inputs_follow_the_folds() -> None:
    model = with_outliers(torch.float32)
    layer, run = next(iter(_layers(model, tokens())))
    with torch.no_grad():
        with recorded(layer) as calls:
            run()
        inputs = inputs_of(layer, calls)
        before = {name: x @ layer.get_submodule(name).weight.T for name, x in inputs.items()}
        smooth(layer, calls, inputs, scheme("w8a8"))
        for name, want in before.items():
            got = inputs[name] @ layer.get_submodule(name).weight.T
            if not name.endswith("up_proj"):  # whose rows are divided themselves
                torch.testing.assert_close(got, want)
        again = torch.cat([layer.self_attn(*args) for args, _ in calls["self_attn"]])
    assert torch.equal(again, torch.cat([result for _, result in calls["self_attn"]]))


def test_powers_are_powers_of_two_and_lower_the_error() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(200, 64, generator=g), torch.randn(32, 64, generator=g)
    x[:, ::16] *= 40
    s = powers(x, [Consumer(w, "w8a8")])
    assert s is not None
    assert torch.equal(s.log2(), s.log2().round())

    def error(x: torch.Tensor, w: torch.Tensor) -> float:
        sx, sw = x.abs().amax(1, keepdim=True) / 127, w.abs().amax(1, keepdim=True) / 127
        got = ((x / sx).round().double() * sx) @ ((w / sw).round().double() * sw).T
        return float((got - x.double() @ w.double().T).norm())

    assert error(x / s, w * s) < 0.5 * error(x, w)


def test_even_inputs_are_left_alone() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.rand(200, 64, generator=g) - 0.5, torch.rand(32, 64, generator=g) - 0.5
    assert powers(x, [Consumer(w, "w8a8")]) is None
    assert powers(x[:0], [Consumer(w, "w8a8")]) is None
