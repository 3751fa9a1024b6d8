"""Tests public models by the numbers of their config.json: sizes and refusals are as stated."""

from __future__ import annotations

import re

import pytest

from deltafront.benchmarks.models.public import REFUSED, SERVED, Public
from deltafront.benchmarks.models.tables import read_public
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.family_registry import FAMILIES


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.name)
def test_a_public_model_has_its_published_size(model: Public) -> None:
    config = read_public(model)
    assert model.billions is not None
    within = 1 if isinstance(model.billions, int) else model.billions / 100
    assert config.as_stored.weights(range(config.layers)) / 1e9 == pytest.approx(model.billions, abs=within)


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
def test_refuses_unsupported_public_models_with_the_reason(model: Public) -> None:
    with pytest.raises(ModelError, match=re.escape(model.reason)) as refusal:
        read_public(model)
    assert "\n" not in str(refusal.value)
    architecture = model.config["architectures"][0]
    assert architecture in str(refusal.value) or architecture in FAMILIES


def test_every_family_has_a_public_model() -> None:
    assert {read_public(model).architecture for model in SERVED} == FAMILIES.keys()
    assert len(SERVED) + len(REFUSED) >= 25
