"""A float model made a quantised one, in place, layer by layer: calibrate, smooth, quantise, measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.checkpoint_forms import is_quantisable
from glm5sdk.models.glm5.decoder import DecoderLayer
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.mla import LatentAttention
from glm5sdk.nn.moe import MLP, Experts
from glm5sdk.nn.quantised import QuantisedExperts, QuantisedLinear
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.ops._weights import quantize_weight
from glm5sdk.quant.capture import Call, Calls, expert_rows, inputs_of, recorded
from glm5sdk.quant.folds import smooth
from glm5sdk.quant.measure import relative_error
from glm5sdk.quant.report import ModuleError, Report
from glm5sdk.quant.scheme import Scheme, check_model
from glm5sdk.quant.search import METHODS, gram, quantise_matrix
from glm5sdk.registry.weight import Weight

__all__ = ["METHODS", "quantise_model"]


def quantise_model(
    model: Glm5ForCausalLM,
    scheme: Scheme,
    ids: Tensor,
    method: str = "gptq",
    on_layer: Callable[[int], None] | None = None,
) -> Report:
    """Quantise a model in place; one layer's activations and float copies exist at a time.

    Args:
        model: float, in memory; its weights are replaced.
        scheme: see `scheme`.
        ids: i64 [B, S] calibration text.
        method: "rtn", "search" or "gptq", each doing what the one before it does and more; see search.py. All but
            "rtn" also smooth (smooth.py), for integer kinds.
        on_layer: called with each layer's number when it is done.

    Returns:
        The report, its `divergence` still to be measured.

    Raises:
        ContractError: the model or an argument does not fit; nothing was changed.
    """
    check_model(model, scheme)
    if method not in METHODS:
        raise ContractError(f"quantize: method is {method!r}, needs one of {', '.join(METHODS)}")
    if ids.dim() != 2 or ids.numel() == 0:
        raise ContractError(f"quantize: calibration ids are {tuple(ids.shape)}, needs [B, S] with at least one token")
    report = Report(scheme.name, method, calibration_tokens=ids.numel())
    report.bytes_before = bytes_by_kind(model)
    with torch.no_grad():
        for number, (layer, run) in enumerate(_layers(model, ids.to(model.device))):
            with recorded(layer) as calls:
                run()
            report.modules += _quantise_layer(layer, calls, number, scheme, method)
            if layer.self_attn.indexer is not None and model.config.sparse_pattern == "indexer":
                report.keys_kept[number] = _keys_kept(layer.self_attn, calls["self_attn"])
            if on_layer is not None:
                on_layer(number)
    report.bytes_after = bytes_by_kind(model)
    return report


def bytes_by_kind(model: Glm5ForCausalLM) -> dict[str, int]:
    """Bytes of parameters and buffers: by kind of module, what is never quantised ("other"), and in total."""
    sizes = dict.fromkeys(("attention", "indexer", "mlp", "experts", "other"), 0)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        weight = part.removesuffix("_values").removesuffix("_scale")
        quantisable = weight == "weight" and is_quantisable(f"{module}.{weight}", (1,) * 2) and "norm" not in module
        sizes[_kind(module) if quantisable or ".experts" in module else "other"] += tensor.nbytes
    return {**sizes, "total": sum(sizes.values())}


def _kind(module: str) -> str:
    for part, kind in ((".indexer", "indexer"), ("self_attn", "attention"), (".experts", "experts")):
        if part in module:
            return kind
    return "mlp"


def _layers(model: Glm5ForCausalLM, ids: Tensor) -> Iterator[tuple[DecoderLayer, Callable[[], None]]]:
    """Each layer with a function that runs it on the calibration text, which is to be called before the next."""
    contexts = [model.context(TokenBatch.packed([len(row)], model.device)) for row in ids]
    streams: list[tuple[Tensor, Tensor | None]] = [(model.model.embed_tokens(row), None) for row in ids]

    def runner(layer: DecoderLayer) -> Callable[[], None]:
        def run() -> None:
            for i, context in enumerate(contexts):
                streams[i] = layer(*streams[i], context)

        return run

    for layer in model.model.layers[: model.model.depth]:
        yield layer, runner(layer)  # type: ignore[arg-type, misc]
    mtp = model.model.mtp
    if mtp is None:
        return
    hidden = [model.model.norm.add(x, residual)[0] for x, residual in streams]

    def draft() -> None:
        for row, states in zip(ids, hidden, strict=True):
            following = torch.cat([row[1:], row[-1:]])
            model.mtp_hidden_states(following, states, model.context(TokenBatch.packed([len(row)], model.device)))

    yield mtp, draft


def _quantise_layer(layer: DecoderLayer, calls: Calls, number: int, scheme: Scheme, method: str) -> list[ModuleError]:
    inputs = inputs_of(layer, calls)
    targets = [name for name in inputs if is_quantisable(f"{name}.weight", (1, 1))]
    nearest = {name: _nearest_error(layer, name, inputs[name], scheme) for name in targets}
    expert_nearest = _expert_errors(layer, calls, scheme)
    if method != "rtn" and scheme.linear == "w8a8":
        smooth(layer, calls, inputs, scheme)
    errors = []
    grams: dict[int, Tensor] = {}
    for name in targets:
        x, w = inputs[name], _weight(layer, name)
        if method != "rtn" and id(x) not in grams:
            grams[id(x)] = gram(x)
        weight = quantise_matrix(w, scheme.linear, method, grams.get(id(x)))
        error = _linear_error(x, w, weight)
        _replace(layer, name, QuantisedLinear(weight))
        errors.append(ModuleError(number, _kind(f".{name}"), name, weight.kind, nearest[name], error))
    for name, module in list(layer.named_modules()):
        if isinstance(module, Experts):
            _replace(layer, name, _quantise_experts(module, calls[name], scheme.experts, method))
            error = _error(layer.get_submodule(name), calls[name])
            errors.append(ModuleError(number, "experts", f"{name}.weights", scheme.experts, expert_nearest, error))
    for name, module in layer.named_modules():
        if isinstance(module, (LatentAttention, MLP, Experts)):
            errors.append(ModuleError(number, _kind(f".{name}"), name, "", math.nan, _error(module, calls[name])))
    return errors


def _weight(layer: nn.Module, name: str) -> Tensor:
    weight = layer.get_submodule(name).weight
    assert isinstance(weight, Tensor), "check_model has seen a float model"
    return weight


def _nearest_error(layer: nn.Module, name: str, x: Tensor, scheme: Scheme) -> float:
    w = _weight(layer, name)
    return _linear_error(x, w, quantize_weight(w, scheme.linear))


def _linear_error(x: Tensor, w: Tensor, weight: Weight) -> float:
    """Relative error of x w^T, before its rounding to the activation dtype."""
    return relative_error(ops.linear(x, weight, None, torch.float32), ops.linear(x, w, None, torch.float32))


def _expert_errors(layer: nn.Module, calls: Calls, scheme: Scheme) -> float:
    """Relative error of the routed experts with nearest rounding; NaN in a layer without."""
    for name, module in layer.named_modules():
        if isinstance(module, Experts):
            kept = [quantize_weight(w, scheme.experts) for w in (module.gate_up_proj, module.down_proj)]
            return _error(QuantisedExperts(kept[0], kept[1], module.limit), calls[name])
    return math.nan


def _quantise_experts(module: Experts, calls: list[Call], kind: str, method: str) -> QuantisedExperts:
    parts: tuple[list[Weight], list[Weight]] = ([], [])
    for expert in range(module.down_proj.shape[0]):
        gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
        x = expert_rows(calls, expert)
        hidden = ops.silu_and_mul(ops.linear(x, gate_up), module.limit)
        for kept, w, rows in ((parts[0], gate_up, x), (parts[1], down, hidden)):
            kept.append(quantise_matrix(w, kind, method, gram(rows) if len(rows) else None))
    gate_up_all, down_all = (_stacked(kept) for kept in parts)
    return QuantisedExperts(gate_up_all, down_all, module.limit)


def _stacked(weights: list[Weight]) -> Weight:
    tensors = tuple(torch.stack(parts) for parts in zip(*(w.tensors for w in weights), strict=True))
    return Weight(weights[0].kind, "plain", (len(weights), *weights[0].shape), tensors)


def _error(module: nn.Module, calls: list[Call]) -> float:
    """Relative error of a module's results on recorded arguments; attention looks at the keys it looked at then."""
    got = torch.cat([module(*(_as_selected(a) for a in args)) for args, _ in calls])
    return relative_error(got, torch.cat([result for _, result in calls]))


def _as_selected(argument: Any) -> Any:
    if not isinstance(argument, ForwardContext) or argument.indices is None:
        return argument
    chosen = argument.indices
    return replace(argument, selection=lambda layer, batch, topk: chosen)


def _keys_kept(attention: LatentAttention, calls: list[Call]) -> float:
    """Share of the float model's selected keys that the quantised indexer selects too."""
    kept, total = 0, 0
    for (hidden, context), _ in calls:
        if context.indices is None:
            continue
        own = replace(context)
        attention(hidden, own)
        was, now = context.indices.flatten(1).long(), own.indices.flatten(1).long()
        row = torch.arange(len(was), device=was.device)[:, None] << 32
        kept += int((torch.isin(was + row, now + row) & (was >= 0)).sum())
        total += int((was >= 0).sum())
    return kept / total if total else 1.0


def _replace(layer: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(layer.get_submodule(parent), own, module)
