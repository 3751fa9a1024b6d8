"""A model directory of any shape with random weights, written as fast as its storage takes it.

Safetensors shards are laid out here rather than by the library, which copies every tensor three times on the
way and holds the interpreter's lock meanwhile; the format is a length, a JSON header and the bytes.
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

from deltafront.service.cli.size import SHAPES as LLAMAS
from deltafront.workers.model.directory.json_files import WEIGHT_INDEX
from deltafront.workers.model.directory.mixture_config import MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig
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
SHAPES: Mapping[str, ModelConfig] = {
    **LLAMAS,
    "32b": _QWEN_32B,
    "30b-a3b": _QWEN_30B_A3B,
    "tiny": replace(TINY, head_dim=64),
}
"""By name. `32b` and `30b-a3b` are Qwen3's; `tiny` is for a CPU."""

_WRITERS = 8
_ENDS = "ends"


def write_model(directory: Path, shape: ModelConfig, device: torch.device) -> None:
    """A directory that `workers.model` loads: bf16 weights drawn on `device`, a tokenizer of few words.

    Weights of this shape that are there already stay; config.json is written last, so that they are whole.
    """
    config, path = _config(shape), directory / "config.json"
    if path.exists() and {**json.loads(path.read_text()), **_positions(shape)} == config:
        path.write_text(json.dumps(config))
        return
    directory.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in shape.shapes().items():
        part = name.split(".")[2] if ".layers." in name else _ENDS
        shards.setdefault(f"model-{part}.safetensors", {})[name] = size
    with ThreadPoolExecutor(_WRITERS) as writers:
        jobs = [
            writers.submit(_write_shard, directory / file, shard, device, seed)
            for seed, (file, shard) in enumerate(shards.items())
        ]
        for job in jobs:
            job.result()
    index = {name: file for file, shard in shards.items() for name in shard}
    (directory / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    words = {f"w{number}": number for number in range(min(64, shape.vocab))}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    path.write_text(json.dumps(config))


def _write_shard(path: Path, shard: Mapping[str, tuple[int, ...]], device: torch.device, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    header: dict[str, Any] = {}
    end = 0
    for name, size in shard.items():
        start, end = end, end + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in shard.values():
            tensor = _draw(size, device, generator)
            file.write(tensor.view(torch.uint8).cpu().numpy().data)


def _draw(size: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Norms are ones; a matrix keeps the size of what it multiplies."""
    tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
    return tensor if len(size) == 1 else tensor.normal_(0.0, size[-1] ** -0.5, generator=generator)


def _config(shape: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": FAMILIES[shape.architecture].model_type,  # for those who read it by transformers
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
        **_positions(shape),
    }


def _mlp(shape: ModelConfig) -> dict[str, Any]:
    mixture = shape.mixture
    if mixture is None:
        return {"intermediate_size": shape.intermediate}
    return {
        "moe_intermediate_size": shape.intermediate,
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "norm_topk_prob": mixture.normed,
    }


def _positions(shape: ModelConfig) -> dict[str, int]:
    """What no weight depends on."""
    return {"max_position_embeddings": shape.positions}
