"""Makes a tiny random Llama on disk, and computes its results in a plain way for comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput, StateSpec, Thresholds
from deltafront.kernels.methods import MethodSpec
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.settings import ModelSpec

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 5, 64, 4, 2, 64, 199


def make_tiny_model(
    directory: Path,
    vocabulary: int = VOCAB,
    positions: int = 4096,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
) -> Path:
    """Write a complete model directory in Hugging Face layout, with weights from a fixed seed."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    weights = {
        "model.embed_tokens.weight": draw(vocabulary, HIDDEN) * HIDDEN**0.5,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": draw(vocabulary, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}self_attn.q_proj.weight": draw(heads * HEAD_DIM, HIDDEN) * 3,
            f"{name}self_attn.k_proj.weight": draw(kv_heads * HEAD_DIM, HIDDEN) * 3,
            f"{name}self_attn.v_proj.weight": draw(kv_heads * HEAD_DIM, HIDDEN),
            f"{name}self_attn.o_proj.weight": draw(HIDDEN, heads * HEAD_DIM),
            f"{name}mlp.gate_proj.weight": draw(96, HIDDEN),
            f"{name}mlp.up_proj.weight": draw(96, HIDDEN),
            f"{name}mlp.down_proj.weight": draw(HIDDEN, 96),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write_weights(directory: Path) -> None:
    """Write bfloat16 zeros of every shape that follows from config.json."""
    shapes = read_config(directory).shapes()
    zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(zeros, directory / "model.safetensors")


def random_ids(tokens: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, VOCAB, tokens, dtype=np.uint32).tobytes()


def greedy(directory: Path, new_tokens: int) -> Callable[[Sequence[int]], list[int]]:
    """Return a function: transformers' `new_tokens` greedy ids after the given ones, end-of-sequence tokens
    ignored. It remembers its answers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end-of-sequence token

    @cache
    def continuation(ids: tuple[int, ...]) -> list[int]:
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        out = model.generate(given, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        return out[0, len(ids) :].tolist()

    return lambda ids: list(continuation(tuple(ids)))


def whole_stack(directory: Path, **more: Any) -> LayerStack:
    """Load a model in float32. more: Further fields of `ModelSpec`."""
    return load_model(ModelSpec(path=str(directory), dtype="float32", **more), "cpu")


def whole_prompt(
    directory: Path, token_ids: bytes, spec: MethodSpec, thresholds: Thresholds | None = None
) -> tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Return the last logits_V and each layer's k_TGD and v_TGD, computed at once by one stack, without pages
    or chunks."""
    stack = whole_stack(directory)
    ids_T = torch.from_numpy(np.frombuffer(token_ids, "<u4").astype(np.int64))
    method = build(spec, thresholds)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen[layer] = k, v
        state = method.new_state(
            StateSpec(1, HEADS, KV_HEADS, HEAD_DIM, len(q), torch.device("cpu"), torch.float32, layer)
        )
        x = AttentionInput.of(*(t.transpose(0, 1)[None].contiguous() for t in (q, k, v)))
        return method.attend(x, state)[0][0].transpose(0, 1)

    hidden_TC = stack.forward(stack.embed(ids_T), torch.arange(len(ids_T)), attend)
    return stack.logits(hidden_TC[-1:])[0], seen
