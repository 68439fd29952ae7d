"""Where smoothing may go in a layer: which matrices read an activation, and what divides it beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.models.glm5.decoder import DecoderLayer
from glm5sdk.nn.mla import LatentAttention
from glm5sdk.nn.moe import MLP, Experts, MixtureOfExperts
from glm5sdk.quant.capture import Call, Calls, expert_rows
from glm5sdk.quant.scheme import Scheme
from glm5sdk.quant.smooth import Consumer, powers
from glm5sdk.registry.weight import load_weight

__all__ = ["smooth"]


def smooth(layer: DecoderLayer, calls: Calls, inputs: dict[str, Tensor], scheme: Scheme) -> None:
    """Fold powers of two into a layer's float weights, and divide its recorded inputs to match.

    Sites: the layer's two norms and the query latent's; the value rows of kv_b_proj before o_proj; the up rows before
    each down_proj. The layer's results stay to the bit.

    Args:
        layer: float; changed.
        calls: of `recorded`; arguments of its feed-forward blocks are changed to what the folded norms give.
        inputs: of `inputs_of`; changed likewise.
        scheme: kinds to which consumers go.
    """
    attention = layer.self_attn
    _attention_input(layer, calls, inputs, scheme)
    _query_latent(attention, inputs, scheme)
    _values(attention, inputs, scheme)
    _feed_forward_input(layer, calls, inputs, scheme)
    for name, module in layer.named_modules():
        if isinstance(module, MLP):
            _down(module, f"{name}.down_proj", inputs, scheme)
        elif isinstance(module, Experts):
            _expert_down(module, calls[name], scheme)


def _attention_input(layer: DecoderLayer, calls: Calls, inputs: dict[str, Tensor], scheme: Scheme) -> None:
    attention, indexer = layer.self_attn, layer.self_attn.indexer
    readers = [attention.q_a_proj.weight, attention.kv_a_proj_with_mqa.weight]
    readers += [indexer.wk.weight] if indexer is not None else []
    s = _powers(inputs["self_attn.q_a_proj"], readers, scheme.linear)
    if s is None:
        return
    _divide(layer.input_layernorm.weight, s)
    for w in [*readers, *([indexer.weights_proj.weight] if indexer is not None else [])]:
        _multiply(w, s)
    _rescale(inputs, ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk"), s)
    _rescale_calls(calls, "self_attn", s)


def _query_latent(attention: LatentAttention, inputs: dict[str, Tensor], scheme: Scheme) -> None:
    readers = [attention.q_b_proj.weight]
    readers += [attention.indexer.wq_b.weight] if attention.indexer is not None else []
    s = _powers(inputs["self_attn.q_b_proj"], readers, scheme.linear)
    if s is None:
        return
    _divide(attention.q_a_layernorm.weight, s)
    for w in readers:
        _multiply(w, s)
    _rescale(inputs, ("self_attn.q_b_proj", "self_attn.indexer.wq_b"), s)


def _values(attention: LatentAttention, inputs: dict[str, Tensor], scheme: Scheme) -> None:
    sizes = attention.sizes
    s = _powers(inputs["self_attn.o_proj"], [attention.o_proj.weight], scheme.linear)
    if s is None:
        return
    rows = torch.ones(sizes.heads, sizes.nope + sizes.value, device=s.device)
    rows[:, sizes.nope :] = s.view(sizes.heads, sizes.value)
    load_weight(attention.kv_b_proj.weight, attention.kv_b_proj.weight / rows.view(-1, 1))
    _multiply(attention.o_proj.weight, s)
    _rescale(inputs, ("self_attn.o_proj",), s)


def _feed_forward_input(layer: DecoderLayer, calls: Calls, inputs: dict[str, Tensor], scheme: Scheme) -> None:
    block = layer.mlp
    if isinstance(block, MLP):
        readers, others, experts = [block.gate_proj.weight, block.up_proj.weight], [], None
        names, name = ("mlp.gate_proj", "mlp.up_proj"), "mlp"
        x = inputs[names[0]]
    else:
        assert isinstance(block, MixtureOfExperts), "a layer's feed-forward is dense or a mixture"
        shared, experts, name = block.shared_experts, block.experts, "mlp.experts"
        readers = [shared.gate_proj.weight, shared.up_proj.weight] if shared is not None else []
        others, names = [block.gate.weight], ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
        x = torch.cat([args[0] for args, _ in calls[name]])
    consumers = [Consumer(w, scheme.linear) for w in readers]
    if experts is not None:
        # All experts as one matrix: each sees some of these tokens, and none is known to see more outliers.
        consumers.append(Consumer(experts.gate_up_proj.flatten(0, 1), scheme.experts))
    s = powers(x, consumers)
    if s is None:
        return
    _divide(layer.post_attention_layernorm.weight, s)
    for w in [*readers, *others, *([experts.gate_up_proj] if experts is not None else [])]:
        _multiply(w, s)
    _rescale(inputs, names, s)
    for block_name in (name, "mlp.shared_experts"):
        _rescale_calls(calls, block_name, s)


def _down(mlp: MLP, name: str, inputs: dict[str, Tensor], scheme: Scheme) -> None:
    """A clamp between up and down would act elsewhere after scaling, so only without one."""
    s = _powers(inputs[name], [mlp.down_proj.weight], scheme.linear) if mlp.limit is None else None
    if s is None:
        return
    load_weight(mlp.up_proj.weight, mlp.up_proj.weight / s[:, None])
    _multiply(mlp.down_proj.weight, s)
    _rescale(inputs, (name,), s)


def _expert_down(module: Experts, calls: list[Call], scheme: Scheme) -> None:
    if module.limit is not None:
        return
    inner = module.down_proj.shape[2]
    for expert in range(module.down_proj.shape[0]):
        x = expert_rows(calls, expert)
        hidden = ops.silu_and_mul(ops.linear(x, module.gate_up_proj[expert]))
        s = powers(hidden, [Consumer(module.down_proj[expert], scheme.experts)])
        if s is not None:
            up = module.gate_up_proj[expert, inner:] / s[:, None]
            load_weight(module.gate_up_proj, up, (expert, slice(inner, None)))
            load_weight(module.down_proj, module.down_proj[expert] * s, expert)


def _powers(x: Tensor, weights: Sequence[Tensor], kind: str) -> Tensor | None:
    return powers(x, [Consumer(w, kind) for w in weights])


def _multiply(weight: Tensor, s: Tensor) -> None:
    load_weight(weight, weight * s)


def _divide(weight: Tensor, s: Tensor) -> None:
    load_weight(weight, weight / s)


def _rescale(inputs: dict[str, Tensor], names: Sequence[str], s: Tensor) -> None:
    """One tensor for all names, as before: whoever derives something from it does so once."""
    held = [name for name in names if name in inputs]
    if held:
        x = inputs[held[0]]
        inputs.update(dict.fromkeys(held, (x / s).to(x.dtype)))


def _rescale_calls(calls: Calls, name: str, s: Tensor) -> None:
    calls[name] = [(((args[0] / s).to(args[0].dtype), *args[1:]), result) for args, result in calls.get(name, [])]
