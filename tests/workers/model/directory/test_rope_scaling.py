"""Tests the override of a model's RoPE scaling, and the YaRN scaling that is proposed for Qwen models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltafront.service.config import ConfigError, parse
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig

from .test_model_config import EXPERTS, LLAMA31, YARN, read

QWEN3: dict[str, Any] = LLAMA31 | {
    "architectures": ["Qwen3ForCausalLM"],
    "rope_scaling": None,
    "max_position_embeddings": 40960,
}


@pytest.mark.parametrize(
    ("architecture", "native", "wanted", "proposal"),
    [
        ("Qwen3", 40960, 131072, "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}"),
        ("Qwen3", 40960, 65536, "{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32768}"),
        (
            "Qwen3Moe",
            262144,
            1048576,
            "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 262144}",
        ),
        ("Qwen3", 40960, 131073, "another model.rope_theta"),
        ("Qwen3", 262144, 524288, "another model.rope_theta"),
        ("Qwen2", 32768, 98304, "{rope_type: yarn, factor: 3.0, original_max_position_embeddings: 32768}"),
        ("Qwen3", 8192, 16384, "another model.rope_theta"),
    ],
)
def test_proposes_the_yarn_scaling_of_a_qwen_model(
    tmp_path: Path, architecture: str, native: int, wanted: int, proposal: str
) -> None:
    raw = QWEN3 | EXPERTS | {"max_position_embeddings": native}
    raw["architectures"] = [f"{architecture}ForCausalLM"]
    with pytest.raises(ModelError, match=re.escape(proposal)) as refusal:
        read(tmp_path, raw, {"max_position_embeddings": wanted})
    if said := re.search(r"model\.rope_scaling: ({.*})", str(refusal.value)):
        scaling = yaml.safe_load(said[1])
        found = read(tmp_path, raw, {"max_position_embeddings": wanted, "rope_scaling": scaling})
        assert found.positions == wanted
        assert found.rope == RopeConfig(5e5, scaling)


def test_rope_scaling_override_replaces_the_scaling_of_config_json(tmp_path: Path) -> None:
    found = read(tmp_path, QWEN3, {"rope_scaling": YARN})
    assert (found.rope, found.positions) == (RopeConfig(5e5, YARN), 131072)
    assert found == read(tmp_path, QWEN3 | {"rope_scaling": YARN})
    other = QWEN3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read(tmp_path, other, {"rope_scaling": YARN, "rope_theta": 1e6}).rope == RopeConfig(1e6, YARN)
    with pytest.raises(ModelError, match="= 131073, but the model has 131072 positions"):
        read(tmp_path, QWEN3, {"rope_scaling": YARN, "max_position_embeddings": 131073})
    with pytest.raises(ModelError, match=r"model\.rope_scaling = .*only YaRN"):
        read(tmp_path, QWEN3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})


GIVEN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (GIVEN | {"facter": 1}, "unknown key 'model.rope_scaling.facter'; did you mean 'factor'?"),
        ({"factor": 2}, "key 'model.rope_scaling.original_max_position_embeddings' is missing"),
        (GIVEN | {"factor": 1}, "model.rope_scaling.factor = 1: must be greater than 1"),
        (GIVEN | {"factor": 65}, "model.rope_scaling.factor = 65: must be less than or equal to 64"),
        (GIVEN | {"rope_type": "linear"}, "model.rope_scaling.rope_type = 'linear': must be 'yarn'"),
        (4, "model.rope_scaling = 4: must be a section with keys factor, original_max_position_embeddings"),
    ],
)
def test_names_the_wrong_key_of_a_configured_rope_scaling(scaling: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse({"model": {"path": "m", "rope_scaling": scaling}, "decode": {"page_selection": "full"}})


def test_configured_rope_scaling_is_an_override() -> None:
    config = parse({"model": {"path": "m", "rope_scaling": GIVEN}, "decode": {"page_selection": "full"}})
    assert config.model.overrides == {"rope_scaling": GIVEN | {"rope_type": "yarn"}}
    assert parse(config.model_dump(mode="json")) == config
