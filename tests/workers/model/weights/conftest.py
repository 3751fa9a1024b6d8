"""A tiny Llama, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 4, 64, 4, 2, 16, 96, 128


def tiny_config(**more: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        initializer_range=0.15,
        **more,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama of four layers in one file. Return its directory."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(tiny_config()).save_pretrained(directory)
    return directory


def causal(_layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
