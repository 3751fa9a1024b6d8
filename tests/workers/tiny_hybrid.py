"""Makes a tiny random hybrid model on disk. Three of four layers have linear attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from deltafront.tests.workers.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB

LAYERS = 8
LINEAR_LAYERS = (0, 1, 2, 4, 5, 6)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "initializer_range": 0.15,
}


def make_tiny_hybrid(directory: Path, layers: int = LAYERS, vocabulary: int = VOCAB) -> Path:
    """Write a Qwen3.5 model directory in Hugging Face layout, with weights from a fixed seed."""
    config = transformers.Qwen3_5TextConfig(**SHAPE | {"num_hidden_layers": layers, "vocab_size": vocabulary})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        slow_decays(model)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@torch.no_grad()
def slow_decays(model: Any) -> None:
    """Let a model's states keep what they hold for some hundred rows, as a trained model's do: decays of
    transformers' initial weights forget it within a few rows."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.copy_(torch.linspace(-6.0, 0.0, len(weight)))
        if name.endswith(("conv1d.weight", "dt_bias")):
            weight.copy_(torch.randn_like(weight) * 0.5)
