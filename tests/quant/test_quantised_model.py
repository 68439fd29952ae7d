"""A quantised model: what it keeps float, that its linears compute what integers say, and that its report is true."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from quant_cases import SCHEMES, quantised, random_model, small, tokens
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.nn.quantised import QuantisedExperts, QuantisedLinear, named_weights, quantised_like, weight_kinds
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.ops._weights import dequantize_weight, quantize_weight
from glm5sdk.quant import compare_logits, held_out_states, quantise_model, scheme
from glm5sdk.quant.capture import recorded
from glm5sdk.quant.model import _error, _keys_kept, _layers
from glm5sdk.registry import Weight

FLOAT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj", "kv_b_proj")


def dequantised(model: Glm5ForCausalLM) -> Glm5ForCausalLM:
    """A float model of the same numbers."""
    plain = Glm5ForCausalLM(model.config).eval()
    values = dict(model.state_dict())
    values.update({name: dequantize_weight(weight) for name, weight in named_weights(model)})
    plain.load_state_dict({k: v for k, v in values.items() if not k.endswith(("_values", "_scale"))})
    return plain


@pytest.mark.parametrize("name", SCHEMES)
def test_every_linear_but_the_skipped_is_quantised(name: str) -> None:
    model, _ = quantised(name)
    held = dict(named_weights(model))
    for parameter, _ in model.named_parameters():
        assert any(part in parameter for part in FLOAT), parameter
    for weight in held:
        assert not any(part in weight for part in FLOAT), weight
    linear, experts = ("fp8", "fp8") if name == "fp8" else ("w8a8", "w4a8" if "w4a8" in name else "w8a8")
    for weight, value in held.items():
        assert value.kind == (experts if ".experts." in weight else linear)
        assert value.layout == "plain"
    ends = {w.rpartition("self_attn.")[2] for w in held if "self_attn" in w}
    assert ends == {
        *("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight"),
        *("indexer.wq_b.weight", "indexer.wk.weight"),
    }
    assert "model.layers.3.mlp.experts.down_proj" in held  # the MTP layer
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in held


def loop_w8a8(x: Tensor, w: Tensor) -> Tensor:
    """Row by row, element by element, integers in Python."""
    out = torch.zeros(len(x), len(w), dtype=torch.float64)
    for o, row in enumerate(w):
        sw = max(float(row.abs().max()), 1e-8) / 127
        qw = [max(-127, min(127, round(float(v) / sw))) for v in row]
        for t, tokens_row in enumerate(x):
            sx = max(float(tokens_row.abs().max()), 1e-8) / 127
            qx = [round(float(v) / sx) for v in tokens_row]
            out[t, o] = sum(a * b for a, b in zip(qx, qw, strict=True)) * sx * sw
    return out


def test_a_quantised_linear_computes_what_integers_say() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 37, generator=g), torch.randn(5, 37, generator=g)
    module = QuantisedLinear(quantize_weight(w, "w8a8"))
    torch.testing.assert_close(module(x).double(), loop_w8a8(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, bound", [("w8a8", 0.1), ("w4a8-experts", 0.1), ("fp8", 0.25)])
def test_logits_are_those_of_the_dequantised_weights_up_to_activations(name: str, bound: float) -> None:
    """With every key selected, so that nothing discrete stands between; the routers decide alike in both."""
    model, _ = quantised(name)
    plain = dequantised(model)
    model.selection = plain.selection = "dense"
    with torch.no_grad():
        got, want = model(tokens()), plain(tokens())
    difference = float((got - want).norm() / want.norm())
    assert 0 < difference < bound


@pytest.mark.parametrize("name", SCHEMES)
def test_it_runs_everything_a_model_runs(name: str) -> None:
    model, _ = quantised(name)
    ids = tokens(2, 12)
    # Integer products are exact in any order; the float8 reference, like any float one, sums as torch pleases.
    tolerance = 1e-4 if name == "fp8" else 0.0
    with torch.no_grad():
        logits = model(ids)
        cache = model.make_cache(2, 32)
        steps = torch.cat([model(ids[:, :5], cache=cache), model(ids[:, 5:], cache=cache)], 1)
        torch.testing.assert_close(logits, steps, rtol=tolerance, atol=tolerance)
        new = model.generate(ids, max_new_tokens=4, ignore_eos=True)
        assert new.shape == (2, 16)
        targets = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        want = logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(model.logprobs(ids, targets).double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids[:1]), logits[:1], rtol=tolerance, atol=tolerance)
        context = model.context(cache.batch([0, 0]).packed([12]))
        hidden = model.hidden_states(ids[0], context)
        drafted = model.mtp_hidden_states(ids[0], hidden, model.context(context.batch))
        assert model.logits(drafted).isfinite().all()


def test_casts_and_moves_leave_integers_and_scales_alone() -> None:
    for name in SCHEMES:
        model, _ = quantised(name)
        before = {n: [t.clone() for t in w.tensors] for n, w in named_weights(model)}
        model.bfloat16()
        assert model.dtype == torch.bfloat16
        assert model.model.layers[0].self_attn.kv_b_proj.weight.dtype == torch.bfloat16
        model.double().float().to("cpu")
        copied = copy.deepcopy(model)
        for n, w in named_weights(copied):
            assert all(
                a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(w.tensors, before[n], strict=True)
            )
        assert model.bfloat16()(tokens(1, 9)).isfinite().all()


def test_state_dict_carries_the_weights() -> None:
    one, two = quantised("w4a8-experts")[0], quantised("w4a8-experts", vocab_size=96)[0]
    for weight in (w for _, w in named_weights(two)):
        for tensor in weight.tensors:
            tensor.zero_()
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(one(tokens()), two(tokens()))


def test_gradients_go_straight_through_to_what_is_float() -> None:
    model, _ = quantised("w8a8")
    model.selection = "dense"
    ids = tokens(1, 10)
    model.logprobs(ids, ids).sum().backward()
    assert not any(w.requires_grad for _, w in named_weights(model))
    plain = dequantised(model)
    plain.selection = "dense"
    plain.logprobs(ids, ids).sum().backward()
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"):
        got, want = model.get_parameter(name).grad, plain.get_parameter(name).grad
        assert got is not None and want is not None
        assert float((got - want).norm() / want.norm()) < 0.2


@pytest.mark.parametrize("name", SCHEMES)
def test_the_report_agrees_with_float64(name: str) -> None:
    """Errors of attention's output projection and of the dense down projection, from activations taken by hand."""
    model, plain = random_model(), random_model()
    report = quantise_model(model, scheme(name), tokens(), "rtn")
    kept: dict[str, list[Tensor]] = {}
    for path in ("self_attn.o_proj", "mlp.down_proj"):
        plain.model.layers[0].get_submodule(path).register_forward_hook(
            lambda m, args, out, path=path: kept.setdefault(path, []).append(args[0])
        )
    with torch.no_grad():
        plain(tokens())
    for path, inputs in kept.items():
        x = torch.cat(inputs).double()
        w = plain.model.layers[0].get_submodule(path).weight.detach().double()
        if name == "fp8":
            groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
            sx = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
            qx = ((groups / sx).float().to(torch.float8_e4m3fn).double() * sx).flatten(1)[:, : x.shape[1]]
            qw = dequantize_weight(quantize_weight(w.float(), "fp8"), torch.float64)
        else:
            sx, sw = x.abs().amax(1, keepdim=True) / 127, w.abs().amax(1, keepdim=True) / 127
            qx, qw = (x / sx).round() * sx, (w / sw).round() * sw
        want = float((qx @ qw.T - x @ w.T).norm() / (x @ w.T).norm())
        (module,) = [m for m in report.modules if m.layer == 0 and m.name == path]
        assert module.error == module.nearest
        assert module.error == pytest.approx(want, rel=2e-2)
    assert report.calibration_tokens == tokens().numel()


def test_the_report_counts_bytes() -> None:
    model = random_model(dtype=torch.bfloat16)
    before = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    report = quantise_model(model, scheme("w4a8-experts"), tokens(), "rtn")
    after = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert (report.bytes_before["total"], report.bytes_after["total"]) == (before, after)
    assert report.bytes_before["experts"] == 3 * 4 * 3 * 128 * 160 * 2  # layers, experts, matrices; bf16
    groups = 2 * 128 * 2 + 160  # scales of one expert: two groups in N = 160, one in I = 128
    assert report.bytes_after["experts"] == 3 * 4 * (3 * 128 * 160 // 2 + 4 * groups)
    assert report.bytes_before["other"] == report.bytes_after["other"]
    assert -0.75 < report.saving("experts") < -0.7 and -0.5 < report.saving("attention") < -0.42


def test_the_divergence_agrees_with_plain_formulas() -> None:
    model, plain, ids = random_model(), random_model(), tokens(3, 20, seed=9)
    before = held_out_states(model, ids)
    quantise_model(model, scheme("w8a8"), tokens(), "rtn")
    got = compare_logits(model, ids, before)
    with torch.no_grad():
        p, q = plain(ids).double().log_softmax(-1), model(ids).double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert got.tokens == 60
    assert got.kl_mean == pytest.approx(float(kl.mean()), rel=1e-6)
    assert got.kl_max == pytest.approx(float(kl.max()), rel=1e-6)
    for found, logs in ((got.perplexity_before, p), (got.perplexity_after, q)):
        loss = -logs[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        assert found == pytest.approx(math.exp(loss), rel=1e-6)
    assert got.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_nothing_quantised_diverges_by_nothing() -> None:
    model, ids = random_model(), tokens(2, 8)
    same = compare_logits(model, ids, held_out_states(model, ids))
    assert (same.kl_mean, same.kl_max, same.agreement) == (0, 0, 1)


def test_the_report_counts_selected_keys_that_stay() -> None:
    """Against sets, from traces of both models over the first layer, whose inputs are the same."""
    model, plain, ids = random_model(), random_model(), tokens()
    report = quantise_model(model, scheme("w4a8-experts"), ids, "rtn")
    assert set(report.keys_kept) == {layer for layer in range(4) if plain.config.has_indexer(layer)}
    kept = total = 0
    for row in ids:
        seen: list[Tensor] = []
        for m in (plain, model):
            traced: dict[str, Tensor] = {}
            context = m.context(TokenBatch.packed([len(row)]), trace=traced.__setitem__)
            with torch.no_grad():
                m.hidden_states(row, context)
            seen.append(traced["layers.0.indices"])
        for was, now in zip(*(s.flatten(1).tolist() for s in seen), strict=True):
            kept += len(set(was) & set(now) - {-1})
            total += len(set(was) - {-1})
    assert report.keys_kept[0] == kept / total


def test_attention_is_measured_on_the_same_keys() -> None:
    """A broken indexer shows in the keys that are kept, not in attention's error."""
    model = random_model()
    layer, run = next(iter(_layers(model, tokens())))
    with torch.no_grad():
        with recorded(layer) as calls:
            run()
        assert (_error(layer.self_attn, calls["self_attn"]), _keys_kept(layer.self_attn, calls["self_attn"])) == (0, 1)
        layer.self_attn.indexer.wq_b.weight.neg_()
        assert _error(layer.self_attn, calls["self_attn"]) == 0
        assert _keys_kept(layer.self_attn, calls["self_attn"]) < 0.9


def test_better_methods_lower_the_experts_error_and_the_report_is_json() -> None:
    reports = {method: quantised("w4a8-experts", method)[1] for method in ("rtn", "search", "gptq")}
    errors = {method: report.linears("experts")[1] for method, report in reports.items()}
    assert errors["gptq"] < errors["search"] < errors["rtn"]
    assert all(report.linears("experts")[0] == pytest.approx(errors["rtn"]) for report in reports.values())
    values = json.loads(reports["gptq"].to_json())
    assert values["scheme"] == "w4a8-experts" and values["divergence"] is None
    assert {m["kind"] for m in values["modules"]} == {"attention", "indexer", "mlp", "experts"}
    assert set(values["blocks"]["attention"]) == {"0", "1", "2", "3"} and "0" not in values["blocks"]["experts"]


def test_wrong_arguments_change_nothing() -> None:
    with pytest.raises(ContractError, match="scheme is 'int3', needs one of w8a8, w4a8-experts, fp8"):
        scheme("int3")
    model = random_model()
    for ids, method, message in (
        (tokens(), "best", "method is 'best', needs one of rtn, search, gptq"),
        (tokens()[:0], "rtn", "needs \\[B, S\\] with at least one token"),
        (tokens()[0], "rtn", "needs \\[B, S\\]"),
    ):
        with pytest.raises(ContractError, match=message):
            quantise_model(model, scheme("w8a8"), ids, method)
    assert not model.weight_kinds
    done, _ = quantised("w8a8")
    with pytest.raises(ContractError, match="the model is w8a8 already"):
        quantise_model(done, scheme("fp8"), tokens())
    narrow = random_model(moe_intermediate_size=64)
    with pytest.raises(ContractError, match="moe_intermediate_size is 64, needs at least 128, one group"):
        quantise_model(narrow, scheme("w4a8-experts"), tokens())
    with pytest.raises(ContractError, match="moe_intermediate_size is 64, needs a multiple of 128 for fp8"):
        quantise_model(narrow, scheme("fp8"), tokens())
    assert not narrow.weight_kinds
    with pytest.raises(ContractError, match="held-out text is 0 tokens long"):
        held_out_states(model, tokens()[:0])


def test_an_expert_that_no_token_reached_is_rounded_to_nearest() -> None:
    model = random_model()
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias[2] = -100.0
    want = quantize_weight(model.model.layers[1].mlp.experts.down_proj[2], "w4a8")
    quantise_model(model, scheme("w4a8-experts"), tokens(), "gptq")
    got = model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(got.tensors[0][2], want.tensors[0])
    assert torch.equal(got.tensors[1][2], want.tensors[1])


def test_quantised_modules_refuse_what_they_cannot_hold() -> None:
    w = quantize_weight(torch.randn(4, 6), "w8a8")
    wrong = Weight("w8a8", "plain", (4, 6), (w.tensors[0], w.tensors[1][:3]))
    for weight in (wrong, Weight("w8a8", "cpu.vnni", (4, 6), w.tensors)):
        with pytest.raises(ContractError, match="needs a quantised weight of \\(4, 6\\) in plain layout"):
            QuantisedLinear(weight)
    model = random_model()
    with pytest.raises(ContractError, match="Embedding got kinds for"):
        quantised_like(model.model.embed_tokens, {"weight": "w8a8"})
    with pytest.raises(ContractError, match="needs a Linear or Experts with a kind for each weight"):
        quantised_like(model.model.layers[1].mlp.experts, {"down_proj": "w4a8"})
    assert isinstance(
        quantised_like(model.model.layers[1].mlp.experts, {"down_proj": "w4a8", "gate_up_proj": "w8a8"}),
        QuantisedExperts,
    )
    assert weight_kinds(model) == frozenset()
    assert small().hidden_size % 128  # the cases above have a partial group
