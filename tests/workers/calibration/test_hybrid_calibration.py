"""Tests the calibration of models with linear attention, whose other layers alone have thresholds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deltafront.kernels.methods import method_spec
from deltafront.tests.workers.tiny_hybrid import LINEAR_LAYERS, make_tiny_hybrid
from deltafront.tests.workers.tiny_model import whole_stack
from deltafront.workers.calibration import delta_layer_search, delta_layers
from deltafront.workers.calibration.method_levels import method_levels
from deltafront.workers.calibration.probes import Document, Question
from deltafront.workers.calibration.tiles import tiles_read
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.settings import ModelSpec

RNG = random.Random(4)
TOKENS = 700
DOCUMENT = Document(
    RNG.choices(range(199), k=TOKENS), [Question("one", tuple(RNG.choices(range(199), k=5)), (17, 4))]
)
SPARSE = method_spec("dpxa", {"min_tokens": 0, "window": 1})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), 4)


@pytest.fixture(scope="module")
def stack(directory: Path) -> LayerStack:
    return whole_stack(directory)


def test_layers_with_linear_attention_get_no_thresholds(stack: LayerStack) -> None:
    assert stack.config.exact_layers == LINEAR_LAYERS[:3]
    (level,) = method_levels(stack, {TOKENS: [DOCUMENT]}, SPARSE, [0.8]).levels
    assert [amounts == (1.0,) * 4 for amounts in level.thresholds] == [True, True, True, False]


def test_page_selecting_layers_have_attention(directory: Path, tmp_path: Path) -> None:
    """Layer 3 selects pages for layers 7 and 11. The other layers have linear attention."""
    stack = whole_stack(make_tiny_hybrid(tmp_path, 12))
    found = delta_layers.calibrate(stack, [DOCUMENT], 1, budget=8, recency=2)
    assert found.delta_layers == (3,)
    with pytest.raises(ValueError, match="single tokens of a text again, which linear attention cannot"):
        delta_layer_search.refine(stack, [DOCUMENT], found, 4, budget=8, recency=2, full_layers=())
    assert {layer for layer, loss in enumerate(found.losses[3]) if loss} == {7, 11}


def test_refuses_later_chunks_without_states(directory: Path) -> None:
    model = ModelSpec(path=str(directory), dtype="float32")
    assert tiles_read(model, DOCUMENT.ids, SPARSE, TOKENS).read_LHNM.shape[0] == 4
    with pytest.raises(ModelError, match="rows after a sequence's start need states"):
        tiles_read(model, DOCUMENT.ids, SPARSE, 256)
