"""Tensor names, shapes and counts against what is published about GLM-5.2 and its FP8 build."""

from __future__ import annotations

import torch
from checkpoint_cases import small

from glm5sdk.models.glm5 import count_parameters, expected_tensors, parameter_shapes, preset
from glm5sdk.models.glm5.checkpoint_fp8 import SIDECAR, is_published_as_fp8, scale_shape
from glm5sdk.models.glm5.tensors import count_active_parameters


def test_published_parameter_counts() -> None:
    config = preset("glm-5.2")
    assert count_parameters(config) == 753_329_921_024
    assert round(count_active_parameters(config) / 1e9, 1) == 40.3
    # GLM-5 differs by the indexers of 57 layers.
    indexer = 4096 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144
    assert count_parameters(preset("glm-5")) == 753_329_921_024 + 57 * indexer


def test_published_fp8_index() -> None:
    """GLM-5.2-FP8's index: 118,629 tensors, 755,617,140,416 bytes."""
    count = nbytes = 0
    for spec in expected_tensors(preset("glm-5.2")):
        if not spec.required:
            continue
        count += 1
        if is_published_as_fp8(spec.name, spec.shape):
            rows, columns = scale_shape(spec.shape)
            count, nbytes = count + 1, nbytes + spec.numel + 4 * rows * columns
        else:
            nbytes += spec.numel * (4 if spec.keep_f32 else 2)
    assert count == 118_629
    assert nbytes == 755_617_140_416


def test_published_shapes_of_a_layer() -> None:
    shapes = {spec.name: spec.shape for spec in expected_tensors(preset("glm-5"))}
    layer = "model.layers.3."
    assert shapes[layer + "self_attn.q_b_proj.weight"] == (16384, 2048)
    assert shapes[layer + "self_attn.kv_a_proj_with_mqa.weight"] == (576, 6144)
    assert shapes[layer + "self_attn.kv_b_proj.weight"] == (28672, 512)
    assert shapes[layer + "self_attn.o_proj.weight"] == (6144, 16384)
    assert shapes[layer + "self_attn.indexer.wq_b.weight"] == (4096, 2048)
    assert shapes[layer + "self_attn.indexer.weights_proj.weight"] == (32, 6144)
    assert shapes[layer + "mlp.experts.255.down_proj.weight"] == (6144, 2048)
    assert shapes["model.layers.78.eh_proj.weight"] == (6144, 12288)
    assert "model.layers.0.mlp.gate.weight" not in shapes
    assert "model.layers.79.input_layernorm.weight" not in shapes


def test_shared_layers_have_no_indexer_tensors() -> None:
    owners = {s.name.split(".")[2] for s in expected_tensors(preset("glm-5.2")) if ".indexer." in s.name}
    assert owners == {str(i) for i in (0, 1, 2, *range(6, 78, 4), 78)}


def test_expert_tensors_tile_the_fused_parameters_exactly() -> None:
    config = small()
    covered = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in parameter_shapes(config).items()}
    for spec in expected_tensors(config):
        if spec.required:
            part = covered[spec.parameter] if spec.index is None else covered[spec.parameter][spec.index]
            assert tuple(part.shape) == spec.shape
            part += 1
    assert all(bool((count == 1).all()) for count in covered.values())
    assert covered["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 2 * 24, 64)
    assert covered["model.layers.4.mlp.experts.down_proj"].shape == (4, 64, 24)


def test_gate_rows_come_before_up_rows() -> None:
    specs = {spec.name: spec for spec in expected_tensors(small())}
    assert specs["model.layers.1.mlp.experts.2.gate_proj.weight"].index == (2, slice(0, 24))
    assert specs["model.layers.1.mlp.experts.2.up_proj.weight"].index == (2, slice(24, 48))


def test_optional_and_f32_tensors() -> None:
    specs = list(expected_tensors(small()))
    assert {s.name: s.duplicate_of for s in specs if not s.required} == {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    assert {s.name for s in specs if s.keep_f32} == {
        f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3, 4)
    }
    tied = {s.name: s.duplicate_of for s in expected_tensors(small(tie_word_embeddings=True)) if not s.required}
    assert tied["lm_head.weight"] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in parameter_shapes(small(tie_word_embeddings=True))


def test_options_leave_tensors_out() -> None:
    names = {spec.name for spec in expected_tensors(preset("seed-b"))}
    assert not any(part in name for name in names for part in ("indexer", "shared_experts", "correction_bias"))
    assert SIDECAR not in "".join(names)
