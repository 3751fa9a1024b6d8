"""Tests that keys missing in config.json have the defaults of transformers' configuration classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import FAMILIES

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "vocab_size": 211,
}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXED = ["sliding_attention", "full_attention"] * 4
ALWAYS: dict[str, dict[str, Any]] = {
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 8,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
    },
    "apertus": {"rope_parameters": LLAMA3 | {"rope_theta": 12e6, "factor": 8.0}},
    "cwm": {"layer_types": MIXED, "rope_parameters": LLAMA3 | {"rope_theta": 1e6, "factor": 16.0}},
    "mellum": {"layer_types": MIXED},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 32},
}
"""Keys that every config.json of a family has."""
KNOWN = [family for family in FAMILIES.values() if family.model_type in CONFIG_MAPPING]


def read(directory: Path, family: Family, raw: dict[str, Any]) -> ModelConfig:
    is_wrapped = family.architecture in family.wrappers
    whole = {"text_config": raw | {"model_type": family.model_type}} if is_wrapped else raw
    (directory / "config.json").write_text(json.dumps(whole | {"architectures": [family.architecture]}))
    return replace(read_config(directory), eos_ids=())


@pytest.mark.parametrize("family", KNOWN, ids=lambda family: family.model_type)
def test_missing_keys_have_the_defaults_of_transformers(tmp_path: Path, family: Family) -> None:
    given = SHAPE | ALWAYS.get(family.model_type, {})
    filled = CONFIG_MAPPING[family.model_type](**given)
    whole = filled.to_dict() | {"head_dim": getattr(filled, "head_dim", None) or 512 // 8}
    assert read(tmp_path, family, given) == read(tmp_path, family, whole)


def test_all_families_but_exaone_are_compared_with_transformers() -> None:
    assert {family.name for family in FAMILIES.values()} - {family.name for family in KNOWN} == {"EXAONE 3.x"}
