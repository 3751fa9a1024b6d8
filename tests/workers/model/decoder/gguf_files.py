"""Writes GGUF files of tiny models, with the metadata and names of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

GGUF: dict[str, tuple[gguf.MODEL_ARCH, bool, str]] = {
    "llama-biases": (gguf.MODEL_ARCH.LLAMA, True, "llama-bpe"),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False, "qwen2"),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False, "qwen2"),
    "qwen3-moe": (gguf.MODEL_ARCH.QWEN3MOE, False, "qwen2"),
    "seed-oss": (gguf.MODEL_ARCH.SEED_OSS, False, "seed-coder"),
    "phi3": (gguf.MODEL_ARCH.PHI3, False, "default"),
    "phi3-longrope-partial": (gguf.MODEL_ARCH.PHI3, False, "gpt-4o"),
    "granite": (gguf.MODEL_ARCH.GRANITE, True, "refact"),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, True, "llama-bpe"),
    "olmo2": (gguf.MODEL_ARCH.OLMO2, False, "dbrx"),
    "glm": (gguf.MODEL_ARCH.CHATGLM, False, "chatglm-bpe"),
    "glm4": (gguf.MODEL_ARCH.GLM4, False, "glm4"),
    "glm4-moe": (gguf.MODEL_ARCH.GLM4_MOE, False, "glm4"),
    "glm4-moe-groups": (gguf.MODEL_ARCH.GLM4_MOE, False, "glm4"),
    "exaone": (gguf.MODEL_ARCH.EXAONE, False, "exaone"),
    "exaone4": (gguf.MODEL_ARCH.EXAONE4, False, "exaone4"),
    "gemma3": (gguf.MODEL_ARCH.GEMMA3, False, "default"),
    "exaone4-windows": (gguf.MODEL_ARCH.EXAONE4, False, "exaone4"),
    "phi3-windows": (gguf.MODEL_ARCH.PHI3, False, "dbrx"),
    "olmo3": (gguf.MODEL_ARCH.OLMO2, False, "dbrx"),
    "ministral3": (gguf.MODEL_ARCH.MISTRAL3, True, "tekken"),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, True, "default"),
    "qwen2-moe": (gguf.MODEL_ARCH.QWEN2MOE, False, "qwen2"),
    "minimax-m2": (gguf.MODEL_ARCH.MINIMAXM2, False, "gpt-4o"),
    "ernie": (gguf.MODEL_ARCH.ERNIE4_5, False, "default"),
    "ernie-moe": (gguf.MODEL_ARCH.ERNIE4_5_MOE, False, "default"),
    "hunyuan-plain": (gguf.MODEL_ARCH.HUNYUAN_DENSE, False, "llama-bpe"),
    "olmoe": (gguf.MODEL_ARCH.OLMOE, False, "dbrx"),
    "dots1": (gguf.MODEL_ARCH.DOTS1, False, "qwen2"),
    "arcee": (gguf.MODEL_ARCH.ARCEE, True, "llama-bpe"),
    "qwen3.5": (gguf.MODEL_ARCH.QWEN35, False, "qwen35"),
    "qwen3.5-ends-linear": (gguf.MODEL_ARCH.QWEN35, False, "qwen35"),
    "qwen3.5-moe": (gguf.MODEL_ARCH.QWEN35MOE, False, "qwen35"),
    "qwen3-next": (gguf.MODEL_ARCH.QWEN3NEXT, False, "qwen2"),
}
"""By case: llama.cpp's architecture, True if its converter interleaves the halves of q's and k's heads, and
llama.cpp's name of the pre-tokenizer (`default`: the vocabulary is sentencepiece's)."""


EXPERT_COUNTS = "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"


def stacked(tensors: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Stack each module's matrices of all experts into one tensor."""
    made = {name: x for name, x in tensors.items() if ".experts." not in name}
    for name in tensors:
        if ".experts.0." in name:
            all_names = [name.replace(".experts.0.", f".experts.{n}.") for n in range(experts)]
            made[name.replace(".experts.0.", ".experts.")] = torch.stack([tensors[one] for one in all_names])
    return made


def add_experts(writer: gguf.GGUFWriter, raw: Mapping[str, Any], experts: int) -> None:
    writer.add_expert_count(experts)
    writer.add_expert_used_count(raw.get("moe_k") or raw["num_experts_per_tok"])
    if raw["model_type"] != "mixtral":
        writer.add_expert_feed_forward_length(raw.get("moe_intermediate_size") or raw["intermediate_size"])
    if raw["model_type"] == "minimax_m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if raw["model_type"] == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(raw["moe_layer_interval"])
        writer.add_leading_dense_block_count(raw["moe_layer_start_index"])
        writer.add_expert_shared_count(raw["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(
            raw["moe_intermediate_size"] * raw["moe_num_shared_experts"]
        )
    if "shared_expert_intermediate_size" in raw:
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])


def add_prediction_layer(writer: gguf.GGUFWriter, layers: int) -> None:
    """Add a multi-token prediction layer, as in GLM-4.5."""
    writer.add_nextn_predict_layers(1)
    for name in ("attn_norm", "ffn_up_exps", "nextn.enorm"):
        writer.add_tensor(f"blk.{layers}.{name}.weight", np.zeros(4, np.float32))


def add_deepseek_experts(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Add the keys of GLM-4.5 and dots.llm1, which name their experts like DeepSeek-V3."""
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_weights_norm(raw["norm_topk_prob"])
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])


def _add_scales(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
        if raw["model_type"] in ("exaone4", "olmo3"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in raw["layer_types"]])
    if beta := raw["rope_parameters"].get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
        writer.add_rope_scaling_yarn_log_mul(raw["rope_parameters"]["mscale_all_dim"])
    if local := raw["rope_parameters"].get("sliding_attention", {}).get("rope_theta"):
        writer.add_rope_freq_base_swa(local)
    if "embedding_multiplier" in raw:
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])


def add_vocabulary(writer: gguf.GGUFWriter, pre: str, size: int) -> None:
    """Add tokens for begin, end and unknown, then tokens of one letter, and a last one of two letters."""
    letters = sorted(ByteLevel.alphabet()) if pre != "default" else list(map(chr, range(0x4E00, 0x9000)))
    tokens = ["<unk>", "<s>", "</s>", *letters[: size - 4], letters[0] + letters[1]]
    writer.add_tokenizer_model("llama" if pre == "default" else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[1] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if pre == "default":
        writer.add_token_scores([float(-rank) for rank in range(len(tokens))])
        writer.add_add_space_prefix(False)
    else:
        writer.add_token_merges([" ".join(letters[:2])])


def add_linear_attention(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    values = raw["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * raw["linear_value_head_dim"])
    if raw["layer_types"][-1] == "full_attention":
        writer.add_full_attention_interval(1 + raw["layer_types"].index("full_attention"))
    else:  # as from a pruned model, whose intervals differ
        recurrent = [kind == "linear_attention" for kind in raw["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    if raw["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def linear_tensors(tensors: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Change the tensors of linear attention as the converter does: decays in place of their logarithms,
    qkvz in two parts without key heads in between, and tiled value heads in Qwen3.5's files."""
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    dims = raw["linear_key_head_dim"], raw["linear_value_head_dim"]
    split, group = 2 * keys * dims[0], values // keys
    made: dict[str, Any] = {}

    def tiled(x: torch.Tensor, width: int) -> torch.Tensor:
        by_keys = x.reshape(keys, group, width, *x.shape[1:])
        return by_keys.transpose(0, 1).reshape(x.shape)

    for name, x in tensors.items():
        if ".linear_attn." not in name:
            made[name] = x
            continue
        module, of = name.split("linear_attn.")
        if of == "in_proj_qkvz.weight":
            by_keys = x.view(keys, -1, x.shape[1])
            parts = torch.split(by_keys, [dims[0], dims[0], group * dims[1], group * dims[1]], dim=1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            made[f"{module}linear_attn.in_proj_qkv.weight"] = torch.cat([q, k, v])
            made[f"{module}linear_attn.in_proj_z.weight"] = z
            continue
        stored = -x.exp() if of == "A_log" else x.squeeze(1) if of == "conv1d.weight" else x
        order = (lambda part, _width: part) if raw["model_type"] == "qwen3_next" else tiled
        if of in ("in_proj_qkv.weight", "conv1d.weight"):
            stored = torch.cat([stored[:split], order(stored[split:], dims[1])])
        elif of == "out_proj.weight":
            stored = order(stored.T, dims[1]).T
        elif of != "norm.weight":
            stored = order(stored, dims[1] if of == "in_proj_z.weight" else 1)
        made[name.replace("dt_bias", "dt_proj.bias")] = stored
    return made


def write_gguf(
    path: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Any],
    architecture: gguf.MODEL_ARCH,
    permuted: bool,
    pre: str,
) -> None:
    """Write a float32 file like llama.cpp's converter. raw: config.json, in transformers' names."""
    name, rope = gguf.MODEL_ARCH_NAMES[architecture], raw["rope_parameters"]
    rope = rope.get("full_attention", rope)
    heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    dim = raw.get("head_dim") or raw["hidden_size"] // heads[0]
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    predicts = raw["model_type"] == "glm4_moe"
    writer.add_block_count(raw["num_hidden_layers"] + predicts)
    if "intermediate_size" in raw:
        writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_key_length(dim)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    add_vocabulary(writer, pre, raw["vocab_size"])
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        stretch, trained = raw["max_position_embeddings"] / 64, math.log(64)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / trained))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    _add_scales(writer, raw)
    if experts := next((raw[key] for key in EXPERT_COUNTS if raw.get(key)), 0):
        add_experts(writer, raw, experts)
        tensors = stacked(tensors, experts)
    if "n_shared_experts" in raw:
        add_deepseek_experts(writer, raw)
    if "linear_num_value_heads" in raw:
        add_linear_attention(writer, raw)
        tensors = linear_tensors(tensors, raw)
    if predicts:
        add_prediction_layer(writer, raw["num_hidden_layers"])
    _add_tensors(writer, raw, tensors, architecture, permuted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(
    writer: gguf.GGUFWriter,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Any],
    architecture: gguf.MODEL_ARCH,
    permuted: bool,
) -> None:
    heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    dim = raw.get("head_dim") or raw["hidden_size"] // heads[0]
    names = gguf.get_tensor_name_map(architecture, raw["num_hidden_layers"])
    for theirs, tensor in tensors.items():
        rows, turned = tensor, theirs.split(".")[-2]
        if permuted and turned in ("q_proj", "k_proj"):
            pairs = tensor.view(heads[turned == "k_proj"], 2, dim // 2, -1)
            rows = pairs.transpose(1, 2).reshape(tensor.shape)
        is_norm = turned.endswith("norm") and ".linear_attn." not in theirs
        if is_norm and (architecture == gguf.MODEL_ARCH.GEMMA3 or "linear_num_value_heads" in raw):
            rows = rows + 1
        known = theirs.replace("e_score_correction_bias", "e_score_correction.bias")
        writer.add_tensor(names.get_name(known, (".weight", ".bias")), rows.squeeze().contiguous().numpy())
