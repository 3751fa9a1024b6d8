"""Writes a model directory of any shape with random weights, as fast as the disk allows.

It writes safetensors shards itself: a length, a JSON header and the bytes. The safetensors library would copy
every tensor three times while it holds the GIL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deltafront.kernels.layers.fp8 import cpu_quantise_rows
from deltafront.service.cli.size import SHAPES as LLAMAS
from deltafront.workers.model.directory.layer_config import LinearConfig, MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import WEIGHT_INDEX
from deltafront.workers.model.directory.rope_config import RopeConfig
from deltafront.workers.model.family_registry import FAMILIES

TINY = replace(LLAMAS["8b"], layers=6, hidden=128, intermediate=256, q_heads=4, kv_heads=2, vocab=512)
_QWEN_32B = replace(
    LLAMAS["8b"],
    architecture="Qwen3ForCausalLM",
    layers=64,
    hidden=5120,
    intermediate=25_600,
    q_heads=64,
    vocab=151_936,
    qk_norm=True,
)
_QWEN_30B_A3B = replace(
    _QWEN_32B,
    architecture="Qwen3MoeForCausalLM",
    layers=48,
    hidden=2048,
    intermediate=768,
    q_heads=32,
    kv_heads=4,
    mixture=MixtureConfig(experts=128, per_token=8, normed=True),
)
_GLM_AIR_8 = replace(
    LLAMAS["8b"],
    architecture="Glm4MoeForCausalLM",
    layers=8,
    intermediate=1408,
    q_heads=96,
    vocab=151_552,
    qkv_bias=True,
    rotary_dim=64,
    mixture=MixtureConfig(
        experts=128,
        per_token=8,
        normed=True,
        sigmoid=True,
        shared_width=1408,
        dense_layers=(0,),
        dense_width=10_944,
    ),
)
_GEMMA_12B = replace(
    LLAMAS["8b"],
    architecture="Gemma3ForCausalLM",
    layers=48,
    hidden=3840,
    intermediate=15_360,
    q_heads=16,
    kv_heads=8,
    head_dim=256,
    vocab=262_144,
    rms_eps=1e-6,
    rope=RopeConfig(1e6),
    tied_embeddings=True,
    qk_norm=True,
    norms="both",
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    embedding_scale=3840**0.5,
    sliding_window=1024,
    window_layers=tuple(layer for layer in range(48) if (layer + 1) % 6),
    window_rope=RopeConfig(1e4),
)
_GEMMA_27B = replace(
    _GEMMA_12B,
    layers=62,
    hidden=5376,
    intermediate=21_504,
    q_heads=32,
    kv_heads=16,
    head_dim=128,
    embedding_scale=5376**0.5,
    window_layers=tuple(layer for layer in range(62) if (layer + 1) % 6),
)
_QWEN_NEXT_16 = replace(
    _QWEN_32B,
    architecture="Qwen3NextForCausalLM",
    layers=16,
    hidden=2048,
    intermediate=512,
    q_heads=16,
    kv_heads=2,
    head_dim=256,
    rms_eps=1e-6,
    rope=RopeConfig(1e7),
    rotary_dim=64,
    norm_offset=1.0,
    attention_gate=True,
    fused_q_gate=True,
    mixture=MixtureConfig(experts=512, per_token=10, normed=True, shared_width=512, shared_gate=True),
    linear=LinearConfig(
        layers=tuple(layer for layer in range(16) if (layer + 1) % 4),
        key_heads=16,
        value_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        fused=True,
    ),
)
SHAPES: Mapping[str, ModelConfig] = {
    **LLAMAS,
    "32b": _QWEN_32B,
    "30b-a3b": _QWEN_30B_A3B,
    "air-8": _GLM_AIR_8,
    "gemma-12b": _GEMMA_12B,
    "gemma-27b": _GEMMA_27B,
    "next-16": _QWEN_NEXT_16,
    "tiny": replace(TINY, head_dim=64),
}
"""Model shapes by name. `32b` and `30b-a3b` are Qwen3's, `gemma-…` Gemma 3's, `air-8` has 8 of the 46 layers
of GLM-4.5-Air, `next-16` 16 of the 48 of Qwen3-Next-80B-A3B, `tiny` is for a CPU."""

_FP8_FILES = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$", r"re:.*in_proj_(ba|b|a)$"],
}
_FP8_MATRICES = tuple(f"{name}.weight" for name in ("_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z"))

_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
_WRITERS = 8
_ENDS = "ends"


def write_model(
    directory: Path, shape: ModelConfig, device: torch.device, *, fp8_files: bool = False
) -> None:
    """Write a directory that `workers.model` loads: bf16 weights drawn on `device`, and a tokenizer.

    If the directory already has weights of this shape, they stay. config.json is written last, so a directory
    with config.json is complete. fp8_files: Store the layers' matrices as compressed-tensors e4m3, rounded by
    `quantise_rows`.
    """
    config = _config(shape) | ({"quantization_config": _FP8_FILES} if fp8_files else {})
    path = directory / "config.json"
    if path.exists() and {**json.loads(path.read_text()), **_positions(shape)} == config:
        path.write_text(json.dumps(config))
        return
    directory.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in shape.shapes().items():
        part = name.split(".")[2] if ".layers." in name else _ENDS
        shards.setdefault(f"model-{part}.safetensors", {})[_stored(name, shape)] = size
    with ThreadPoolExecutor(_WRITERS) as writers:
        jobs = [
            writers.submit(_write_shard, directory / file, shard, device, seed, fp8_files)
            for seed, (file, shard) in enumerate(shards.items())
        ]
        index = {name: file for file, job in zip(shards, jobs, strict=True) for name in job.result()}
    (directory / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _write_tokenizer(directory, shape.vocab)
    path.write_text(json.dumps(config))


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer with a word for each token id, so that each generated token is streamed at once."""
    words = {f"w{number}": number for number in range(vocabulary)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}  # else vLLM takes the class from config.json
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))


def _stored(name: str, shape: ModelConfig) -> str:
    """Return the name of a tensor in the files of the model's family."""
    own = {f".{ours}.": f".{theirs}." for theirs, ours in FAMILIES[shape.architecture].tensors.items()}
    return next((name.replace(ours, theirs) for ours, theirs in own.items() if ours in name), name)


def _write_shard(
    path: Path, shard: Mapping[str, tuple[int, ...]], device: torch.device, seed: int, fp8_files: bool
) -> list[str]:
    """Write a shard and return the names of its tensors."""
    generator = torch.Generator(device).manual_seed(seed)
    header: dict[str, Any] = {}
    end = 0
    for name, size in shard.items():
        rounded = fp8_files and name.endswith(_FP8_MATRICES)
        parts = {name: ("F8_E4M3" if rounded else "BF16", size)}
        parts |= {f"{name}_scale": ("F32", (size[0], 1))} if rounded else {}
        for part, (kind, shape) in parts.items():
            start, end = end, end + _BYTES[kind] * torch.Size(shape).numel()
            header[part] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in shard.items():
            tensor = _draw(size, device, generator)
            tensors = [tensor]
            if f"{name}_scale" in header:
                rows = cpu_quantise_rows(tensor.float())
                tensors = [rows.values_TI, rows.scale_T1]
            for one in tensors:
                file.write(one.view(torch.uint8).cpu().numpy().data)
    return list(header)


def _draw(size: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Draw a matrix that preserves the magnitude of its input. A norm's weights are ones."""
    tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
    return tensor if len(size) == 1 else tensor.normal_(0.0, size[-1] ** -0.5, generator=generator)


def _config(shape: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": FAMILIES[shape.architecture].model_type,  # transformers needs it
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        **_mlp(shape),
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope.theta,
        "torch_dtype": "bfloat16",
        **_windows(shape),
        **_linear(shape),
        **_positions(shape),
    }


def _windows(shape: ModelConfig) -> dict[str, Any]:
    if not shape.windows:
        return {}
    kinds = [
        "sliding_attention" if layer in shape.windows else "full_attention" for layer in range(shape.layers)
    ]
    return {"sliding_window": shape.sliding_window, "layer_types": kinds}


def _linear(shape: ModelConfig) -> dict[str, Any]:
    if (linear := shape.linear) is None:
        return {}
    kinds = [
        "linear_attention" if layer in linear.layers else "full_attention" for layer in range(shape.layers)
    ]
    return {
        "layer_types": kinds,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv_width,
        "partial_rotary_factor": (shape.rotary_dim or shape.head_dim) / shape.head_dim,
    }


def _mlp(shape: ModelConfig) -> dict[str, Any]:
    mixture = shape.mixture
    if mixture is None:
        return {"intermediate_size": shape.intermediate}
    made = {
        "moe_intermediate_size": shape.intermediate,
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "norm_topk_prob": mixture.normed,
    }
    if mixture.shared_gate:
        made |= {"shared_expert_intermediate_size": mixture.shared_width}
    if mixture.sigmoid:
        made |= {
            "intermediate_size": mixture.dense_width,
            "attention_bias": shape.qkv_bias,
            "n_routed_experts": made.pop("num_experts"),
            "n_shared_experts": mixture.shared_width // shape.intermediate,
            "first_k_dense_replace": len(mixture.dense_layers),
            "num_nextn_predict_layers": 0,
        }
    return made


def _positions(shape: ModelConfig) -> dict[str, int]:
    """Return the keys of config.json that can change while the weights stay the same."""
    return {"max_position_embeddings": shape.positions}
