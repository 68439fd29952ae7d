"""Weights that change under way: each request gets what a model with its weights alone would give it."""

from __future__ import annotations

import atexit
import copy
import gc
import json
import shutil
import tempfile
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_cases import Results, check_drained, make_model, take_step
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.nn.adapters import load_adapter
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.serve import LLM, EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.params import SamplingParams

PARAMS = SamplingParams(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
KINDS = ("whole", "experts", "one expert")


def changed_model(seed: int, kind: str) -> Glm5ForCausalLM:
    """The test's model with other numbers in all weights, in all experts, or in one."""
    twin = copy.deepcopy(make_model())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            if kind == "one expert":
                noise = noise * 0 if ".1.mlp.experts." not in name else torch.cat([noise[:1], 0 * noise[1:]])
            elif kind == "experts" and ".experts." not in name:
                continue
            parameter += noise
    return twin


def is_part(name: str, kind: str) -> bool:
    return {"whole": True, "experts": ".mlp.experts." in name, "one expert": ".layers.1.mlp.experts.0." in name}[kind]


@cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def update(seed: int, kind: str) -> Path:
    """A checkpoint of what `changed_model` changed."""
    whole, part = folder() / f"{kind}{seed}", folder() / f"{kind}{seed}.safetensors"
    changed_model(seed, kind).save_pretrained(whole)
    tensors = load_file(str(whole / "model.safetensors"))
    save_file({name: t for name, t in tensors.items() if is_part(name, kind)}, str(part))
    return part


@cache
def adapter(seed: int) -> Path:
    """A LoRA adapter for every output projection of attention."""
    path = folder() / f"adapter{seed}"
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in make_model().named_parameters():
        if name.endswith("o_proj.weight"):
            out, into = parameter.shape
            target = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{target}.lora_A.weight"] = torch.randn(4, into, generator=generator) * 0.3
            tensors[f"{target}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.3
    save_file(tensors, str(path / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


@cache
def weights(update_seed: int | None, kind: str, adapter_seed: int | None) -> tuple[Glm5ForCausalLM, WeightView]:
    model = copy.deepcopy(make_model()) if update_seed is None else changed_model(update_seed, kind)
    view = WeightView.of(model, "x")
    if adapter_seed is not None:
        view = view.with_adapter("x+a", load_adapter(adapter(adapter_seed), model, "a"))
    return model, view


@cache
def alone(prompt: tuple[int, ...], update_seed: int | None, kind: str, adapter_seed: int | None) -> list[int]:
    model, view = weights(update_seed, kind, adapter_seed)
    with view.active(model):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
    return out[0, len(prompt) :].tolist()


def fresh_engine(**config) -> Engine:
    config = {"page_size": 4, "num_pages": 64, "async_scheduling": False} | config
    return Engine(copy.deepcopy(make_model()), None, EngineConfig(**config))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("request"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("update"), st.integers(1, 3), st.sampled_from(KINDS)),
        st.tuples(st.just("adapter"), st.integers(1, 2), st.just("")),
        st.tuples(st.just("steps"), st.integers(1, 4), st.just("")),
    ),
    min_size=4,
    max_size=14,
)


@given(ACTIONS, st.sampled_from([0, 2]), st.booleans())
@settings(deadline=None, max_examples=15)
def test_requests_keep_the_weights_they_were_admitted_with(actions, drafts, run_ahead):
    engine = fresh_engine(speculative_tokens=drafts, async_scheduling=run_ahead, max_num_seqs=5)
    base: tuple[int | None, str] = (None, "whole")
    loaded: int | None = None
    wanted: dict[str, list[int]] = {}
    results: Results = {}
    for count, (action, number, extra) in enumerate(actions):
        if action == "request":
            prompt = (5, 6, 7, 8, 9, 10 + number)
            name = "a" if extra and loaded is not None else None
            engine.add(str(count), prompt, PARAMS, adapter=name)
            wanted[str(count)] = alone(prompt, *base, loaded if name else None)
        elif action == "update":
            if base[0] is not None:  # partial updates add up; the oracle knows one at a time
                engine.control.run("update_weights", {"path": str(original())})
            engine.control.run("update_weights", {"path": str(update(number, extra)), "version": f"v{count}"})
            base = number, extra
        elif action == "adapter":
            engine.control.run("load_adapter", {"name": "a", "path": str(adapter(number))})
            loaded = number
        else:
            for _ in range(number):
                take_step(engine, results)
    while engine.has_work():
        take_step(engine, results)
    check_drained(engine)
    engine.close()
    assert {name: results[name, 0].token_ids for name in wanted} == wanted


@cache
def original() -> Path:
    path = folder() / "original"
    make_model().save_pretrained(path)
    return path / "model.safetensors"


def test_versions_are_reported_and_prefixes_are_not_shared_between_them():
    engine = fresh_engine()
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    versions, cached = [], []
    for change in (None, None, "update", None, "adapter", None):
        if change == "update":
            engine.control.run("update_weights", {"path": str(update(1, "whole")), "version": "second"})
        elif change == "adapter":
            engine.control.run("load_adapter", {"name": "a", "path": str(adapter(1))})
        engine.add("x", prompt, PARAMS, adapter="a" if "a" in engine.weights.adapters else None)
        deltas = []
        while engine.has_work():
            deltas += engine.step()
        versions.append(deltas[-1].weight_version)
        cached.append(deltas[-1].cached_tokens)
    assert versions == ["default", "default", "second", "second", "second+a", "second+a"]
    assert [c > 0 for c in cached] == [False, True, False, True, False, True]


def test_old_weights_are_freed_when_the_last_request_leaves():
    engine = fresh_engine()
    engine.add("old", [5, 6, 7], PARAMS)
    engine.step()
    name = "model.layers.0.self_attn.o_proj.weight"
    old = weakref.ref(engine.weights.base.weight(name))
    engine.control.run("update_weights", {"path": str(update(1, "whole"))})
    gc.collect()
    assert old() is not None
    while engine.has_work():
        engine.step()
    gc.collect()
    assert old() is None


def test_a_damaged_update_changes_nothing(tmp_path):
    engine = fresh_engine()
    engine.add("x", (5, 6, 7), PARAMS)
    engine.step()
    tensors = load_file(str(update(1, "whole")))
    for name in list(tensors)[3:5]:
        tensors[name] = tensors[name].clone().fill_(torch.nan)
    save_file(tensors, str(tmp_path / "nan.safetensors"))
    data = update(1, "whole").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 1000)
    for file in ("nan", "short", "noise", "absent"):
        with pytest.raises(CheckpointError, match=file):
            engine.control.run("update_weights", {"path": str(tmp_path / f"{file}.safetensors")})
    with pytest.raises(ContractError, match="experts alone"):
        engine.control.run("swap_experts", {"path": str(update(1, "whole"))})
    with pytest.raises(ContractError, match="'b'"):
        engine.add("y", (5, 6, 7), PARAMS, adapter="b")
    results: Results = {}
    engine.add("z", (5, 6, 7), PARAMS)
    while engine.has_work():
        take_step(engine, results)
    assert engine.weight_version == "default"
    assert results["z", 0].token_ids == alone((5, 6, 7), None, "whole", None)


def test_swapped_experts_need_only_their_own_memory():
    engine = fresh_engine()
    before = engine.weights.base
    engine.control.run("swap_experts", {"path": str(update(1, "one expert"))})
    sizes = [t.numel() * 4 for name, t in load_file(str(update(1, "one expert"))).items()]
    assert engine.weights.base.nbytes_beside(before) == sum(sizes)


@pytest.mark.parametrize("slots", [1, 3])
def test_offloaded_experts_give_the_same_tokens(slots):
    prompts = [[5, 6, 7, 8], [9, 10], [11] * 12]
    want = [alone(tuple(p), None, "whole", None) for p in prompts]
    llm = LLM(original().parent, expert_slots=slots, page_size=4, num_pages=64, speculative_tokens=2)
    got = llm.generate(prompts, PARAMS)
    llm.shutdown()
    assert [o.outputs[0].token_ids for o in got] == want
