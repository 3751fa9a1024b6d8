"""Makes a tiny random model on disk. Six of eight layers have sliding windows, those that have linear
attention in `tiny_hybrid`."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from deltafront.tests.workers.tiny_hybrid import LAYERS, LINEAR_LAYERS
from deltafront.tests.workers.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB

WINDOW = 50
"""No multiple of a page, and less than most prompts of the tests."""


def make_tiny_windows(directory: Path, vocabulary: int = VOCAB) -> Path:
    """Write a Gemma 3 model directory in Hugging Face layout, with weights from a fixed seed."""
    kinds = ["sliding_attention" if layer in LINEAR_LAYERS else "full_attention" for layer in range(LAYERS)]
    config = transformers.Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=40,
        max_position_embeddings=4096,
        initializer_range=0.2,
        sliding_window=WINDOW,
        layer_types=kinds,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory
