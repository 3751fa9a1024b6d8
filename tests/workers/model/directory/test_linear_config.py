"""Tests reading linear attention from config.json: which layers have it, and what follows from its sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deltafront.workers.model.directory import model_config
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.layer_config import LinearConfig
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.family_registry import FAMILIES

LAYERS = 8
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 211,
    "max_position_embeddings": 16_384,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
LINEAR, FULL = "linear_attention", "full_attention"
NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [1, 3],
}


def read(directory: Path, **change: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(QWEN3_5 | change))
    return read_config(directory)


@pytest.mark.parametrize(
    ("change", "linear"),
    [
        ({}, (0, 1, 2, 4, 5, 6)),
        ({"full_attention_interval": 2}, (0, 2, 4, 6)),
        ({"full_attention_interval": 3}, (0, 1, 3, 4, 6, 7)),
        ({"layer_types": [FULL, LINEAR] * 4, "full_attention_interval": 4}, (1, 3, 5, 7)),
        ({"layer_types": [FULL] * LAYERS}, ()),
    ],
)
def test_reads_which_layers_have_linear_attention(
    tmp_path: Path, change: dict[str, Any], linear: tuple[int, ...]
) -> None:
    config = read(tmp_path, **change)
    assert config.linear_layers == linear and (config.linear is None) == (not linear)
    assert config.attention_layers(range(2, 6)) == tuple(n for n in range(2, 6) if n not in linear)


def test_sizes_of_states_follow_from_the_heads(tmp_path: Path) -> None:
    linear = read(tmp_path, linear_conv_kernel_dim=3).linear
    assert linear == LinearConfig(
        layers=(0, 1, 2, 4, 5, 6), key_heads=2, value_heads=6, key_dim=16, value_dim=32, conv_width=3
    )
    assert linear.conv_channels == 2 * 2 * 16 + 6 * 32
    assert (linear.conv_shape, linear.recurrent_shape) == ((2, 256), (6, 16, 32))
    assert linear.state_bytes(2) == 2 * 256 * 2 + 6 * 16 * 32 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [LINEAR] * LAYERS}, "all layers have linear attention"),
        ({"full_attention_interval": 9}, "all layers have linear attention"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"layer_types": [LINEAR, FULL]}, "must be 8 of linear_attention and full_attention"),
        ({"layer_types": [LINEAR, "sliding_attention"] * 4}, "must be 8 of linear_attention"),
        ({"layer_types": LINEAR}, "must be 8 of linear_attention"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads = 5 is no multiple of .* = 2"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 must be 2 or more"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({**NEXT, "norm_topk_prob": False, "architectures": ["Qwen3_5MoeForCausalLM"]}, "norm_topk_prob"),
    ],
)
def test_refuses_contradictory_or_unsupported_values(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **change)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"norms": "both"}, "linear attention is supported only with norms before"),
        ({"parallel": True}, "linear attention is supported only with norms before"),
        ({"attention_gate": False}, "a gate in q_proj is supported only"),
        ({"qkv_bias": True}, "a gate in q_proj is supported only"),
    ],
)
def test_refuses_families_whose_features_do_not_combine(
    tmp_path: Path, fixed: dict[str, Any], message: str
) -> None:
    family = FAMILIES["Qwen3_5ForCausalLM"]
    other = replace(family, fixed={**family.fixed, **fixed})
    with mock.patch.dict(FAMILIES, {family.architecture: other}), pytest.raises(ModelError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    "change", [{}, NEXT, {"layer_types": [FULL, LINEAR] * 4}], ids=["3.5", "next", "ends"]
)
def test_counts_weights_of_each_kind_of_layer(tmp_path: Path, change: dict[str, Any]) -> None:
    config = read(tmp_path, **change)
    shapes, all_layers = config.shapes(), range(LAYERS)
    repeated = (config.q_heads + config.kv_heads - 2) * config.head_dim  # norms of heads
    for n in all_layers:
        own = {name: shape for name, shape in shapes.items() if name.startswith(f"model.layers.{n}.")}
        is_linear = n in config.linear_layers
        assert any(".linear_attn." in name for name in own) == is_linear
        assert any(".self_attn." in name for name in own) != is_linear
        wanted = sum(map(math.prod, own.values())) + (0 if is_linear else repeated)
        assert config.weights(range(n, n + 1), embedding=False, head=False) == wanted
    for layers in (all_layers, range(1, 3), range(3, 4)):
        kinds = config.kinds(layers)
        assert sum(count for _kind, count in kinds) == len(layers)
        for total in ("mlp_macs", "attention_macs", "macs_per_pair"):
            wanted = sum(getattr(config.of_layer(n), total) for n in layers)
            assert sum(count * getattr(kind, total) for kind, count in kinds) == wanted


def test_linear_attention_has_matrices_but_no_pairs(tmp_path: Path) -> None:
    config = read(tmp_path)
    linear, full = config.of_layer(0), config.of_layer(3)
    projections = 2 * 2 * 16 + 2 * 6 * 32 + 2 * 6
    assert linear.attention_matrices == 512 * (projections + 6 * 32)
    assert (linear.macs_per_pair, full.macs_per_pair) == (0, 2 * 8 * 64)
    assert full.attention_macs == full.attention_matrices < linear.attention_macs + full.attention_matrices
    assert full.attention_matrices == 512 * 64 * (8 + 2 * 2) + 2 * 512 * 512
    assert {*config.matrix_widths()} == {512, 96, 8 * 64, 6 * 32, 2 * 2 * 16 + 6 * 32}


@pytest.mark.parametrize("last", [FULL, LINEAR])
def test_stages_count_a_last_layer_with_linear_attention_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Most rows of a last layer need only its K and V. Linear attention has none."""
    config, counted = read(tmp_path, layer_types=[FULL] * 7 + [last]), list[int]()
    monkeypatch.setattr(model_config, "balanced", lambda costs, _stages: counted.extend(costs))
    config.split(2)
    kind, head = config.of_layer(7), config.vocab * config.hidden // 512
    complete = [kind.attention_macs + head, kind.mlp_macs]
    assert counted[-2:] == (complete if last == LINEAR else [config.qkv_matrices + head, 0])


def test_ranks_share_the_heads_of_linear_attention(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.of_rank(1) == config
    part = config.of_rank(2)
    assert config.linear is not None and part.linear is not None
    assert (part.linear.key_heads, part.linear.value_heads) == (1, 3)
    assert 2 * part.linear.conv_channels == config.linear.conv_channels
    assert 2 * part.state_bytes(range(8), 2) == config.state_bytes(range(8), 2)
    with pytest.raises(ModelError, match="cannot share the model's 3 heads of linear attention's keys"):
        replace(config, linear=replace(config.linear, key_heads=3)).of_rank(2)
