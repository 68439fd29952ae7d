"""Write a GLM-5 checkpoint as the GGUF file that llama.cpp's `glm-dsa` architecture loads; needs numpy and gguf.

Matrices stay the bfloat16 they are, or become Q8_0 (int8 in blocks of 32); norms, biases and the router are float32.
The file has no vocabulary: the benchmark feeds token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURE = "glm-dsa"
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
KV_B = "self_attn.kv_b_proj.weight"
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FLOAT32 = ("ffn_gate_inp.weight",)


def write(checkpoint: Path, target: Path, int8: bool = False) -> None:
    """Convert a directory with config.json and safetensors in Hugging Face's names.

    Raises:
        ValueError: a tensor has a dtype or a name that this does not know.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), ARCHITECTURE)
    _describe(writer, config)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in _tensors(checkpoint):
        for gguf_name, array in _renamed(name, values, config, experts):
            _add(writer, gguf_name, array, int8)
    if experts:
        raise ValueError(f"gguf: experts of {', '.join(sorted(experts))} are incomplete")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, c: dict[str, Any]) -> None:
    rope, latent = c["qk_rope_head_dim"], c["kv_lora_rank"]
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(1)  # latent attention: one key and value for all heads
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_layer_norm_eps(1e-6)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(rope)
    writer.add_vocab_size(c["vocab_size"])
    writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(c["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(c["v_head_dim"])
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    writer.add_expert_weights_norm(c["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_indexer_head_count(c["index_n_heads"])
    writer.add_indexer_key_length(c["index_head_dim"])
    writer.add_indexer_top_k(c["index_topk"])
    writer.add_tokenizer_model("none")


def _tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, values): uint16 for bfloat16, else float32; a safetensors file is a JSON header and bytes."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in ("BF16", "F32"):
                raise ValueError(f"gguf: {name} is {entry['dtype']}, needs BF16 or F32")
            kind = np.uint16 if entry["dtype"] == "BF16" else np.float32
            yield name, data[begin:end].view(kind).reshape(entry["shape"])


def _renamed(
    name: str, values: np.ndarray, c: dict[str, Any], experts: dict[str, dict[int, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor under its name there: the experts of a layer become one, the halves of kv_b two."""
    if name in TOP:
        yield TOP[name], values
        return
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise ValueError(f"gguf: tensor {name} is not one of a GLM-5 model")
    layer, part = int(match.group(1)), match.group(2)
    if layer >= c["num_hidden_layers"]:
        return  # multi-token prediction is not measured
    if part in LAYER:
        yield f"blk.{layer}.{LAYER[part]}", values
    elif part == KV_B:
        heads, nope = c["num_attention_heads"], c["qk_nope_head_dim"]
        both = values.reshape(heads, nope + c["v_head_dim"], -1)
        yield f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(both[:, :nope].transpose(0, 2, 1))
        yield f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(both[:, nope:])
    elif found := EXPERT.fullmatch(part):
        whole = f"blk.{layer}.ffn_{found.group(2)}_exps.weight"
        gathered = experts.setdefault(whole, {})
        gathered[int(found.group(1))] = values
        if len(gathered) == c["n_routed_experts"]:
            yield whole, np.stack([gathered[e] for e in range(len(gathered))])
            del experts[whole]
    else:
        raise ValueError(f"gguf: tensor {name} is not one of a GLM-5 model")


def _add(writer: Any, name: str, values: np.ndarray, int8: bool) -> None:
    narrow = values.dtype == np.uint16
    if values.ndim == 1 or any(name.endswith(end) for end in FLOAT32) or not narrow:
        writer.add_tensor(name, _float32(values))
    elif int8:
        quantised = gguf.quants.quantize(_float32(values), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, np.ascontiguousarray(values).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def _float32(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)
