"""Tests the tiles that a method selects against those that a prefill group reports as computed."""

from __future__ import annotations

import numpy as np
import pytest

from deltafront.kernels.methods import method_spec
from deltafront.tests.workers.in_process import run_in_process
from deltafront.workers.calibration.tiles import tiles_read
from deltafront.workers.settings import ModelSpec, PrefillConfig

from ..tiny_model import HEADS, LAYERS, random_ids

TOKENS, CHUNK = 700, 256


@pytest.mark.parametrize("name", ["dense", "streaming", "xattention", "dpxa"])
def test_shown_tiles_equal_the_tiles_a_prefill_group_computes(model: ModelSpec, name: str) -> None:
    """In the last layer a group computes attention only for the last block."""
    options = {} if name == "dense" else {"min_tokens": 0, "window": 1}
    options |= {"tau": 0.5} if name in ("xattention", "dpxa") else {}
    spec, ids = method_spec(name, options), random_ids(TOKENS)
    seen: list[int] = []
    found = tiles_read(model, np.frombuffer(ids, "<u4").tolist(), spec, CHUNK, progress=seen.append)
    assert seen == [256, 512, 700]
    assert found.read_LHNM.shape == (LAYERS, HEADS, 6, 6)
    assert not np.triu(found.read_LHNM, 1).any()
    assert found.read_LHNM.diagonal(axis1=-2, axis2=-1).all()
    config = PrefillConfig(stages=1, chunk_tokens=CHUNK, cache_tokens=1024, device="cpu")
    report, _logits = run_in_process(model, config, ids, spec)
    computed = {one.layer: one.computed for one in report.density}
    tiles_L = [float(found.read_LHNM[layer].sum()) for layer in range(LAYERS - 1)]
    tiles_L.append(float(found.read_LHNM[-1][:, -1].sum()))
    assert computed == dict(enumerate(tiles_L))
    if name != "dense":
        assert float(found.density_LH.mean()) < 1
    else:
        assert (found.density_LH == np.ones((LAYERS, HEADS))).all()


def test_shows_tiles_without_the_corrections_and_of_short_prompts(model: ModelSpec) -> None:
    ids = np.frombuffer(random_ids(TOKENS), "<u4").tolist()
    plain = tiles_read(model, ids, method_spec("streaming", {"min_tokens": 0, "window": 1}), CHUNK)
    wrapped = tiles_read(model, ids, method_spec("streaming+delta", {"min_tokens": 0, "window": 1}), CHUNK)
    assert np.array_equal(plain.read_LHNM, wrapped.read_LHNM)
    short = tiles_read(model, ids, method_spec("streaming"), CHUNK)
    assert (short.density_LH == np.ones((LAYERS, HEADS))).all()


@pytest.mark.parametrize("tokens", [0, 4097])
def test_refuses_a_prompt_that_cannot_be_shown(model: ModelSpec, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens: must be between 1 and the model's 4096"):
        tiles_read(model, [1] * tokens, method_spec("dense"), CHUNK)
