"""Tests stages that begin or end inside a layer: for any cuts, they hand over the same KV and logits as one
stage, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import DecoderLayer, Residual
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.prefill.stage.warm_up import warm_up
from deltafront.workers.settings import ModelSpec

from ..tiny_model import LAYERS, random_ids
from .test_prefill_stage import DENSE, SPARSE, Collector, pipeline, prefill

CUTS = [(1,), (5,), (7,), (1, 3), (3, 6), (2, 5, 7), (1, 3, 5, 7)]
"""Cuts, counted in halves of layers: attention 0, MLP 0, attention 1, … An odd number cuts a layer in two. In
the last case the first stage has only an attention, each later one an MLP and the next layer's attention."""


def force(monkeypatch: pytest.MonkeyPatch, halves: Sequence[int]) -> None:
    """Make `ModelConfig.split` use these cuts."""
    bounds = itertools.pairwise([0, *halves, 2 * LAYERS])
    shares = tuple(LayerShare(range((a + 1) // 2, (b + 1) // 2), range(a // 2, b // 2)) for a, b in bounds)

    def split(self: ModelConfig, stages: int) -> tuple[LayerShare, ...]:
        whole = range(self.layers)
        return (LayerShare(whole, whole),) if stages == 1 else shares

    monkeypatch.setattr(ModelConfig, "split", split)


@pytest.mark.parametrize("halves", CUTS, ids=str)
@pytest.mark.parametrize(
    "method", [DENSE, SPARSE, method_spec("dpxa", {"min_tokens": 0})], ids=lambda m: m.name
)
async def test_layers_cut_between_stages_give_the_same_kv_and_logits(
    model: ModelSpec, halves: tuple[int, ...], method: MethodSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, halves)
    ids, sinks = random_ids(500), (Collector(), Collector())
    for stages, sink in zip((1, len(halves) + 1), sinks, strict=True):
        async with pipeline(model, sink, stages=stages, warm_up=("dense",)) as controller:
            report = await prefill(controller, "r", ids, method)
        assert [density.layer for density in report.density] == list(range(LAYERS))
    one, cut = sinks
    assert np.array_equal(cut.logits["r"], one.logits["r"])
    for layer in range(LAYERS):
        for found, wanted in zip(await cut.joined("r", layer), await one.joined("r", layer), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("halves", CUTS, ids=str)
def test_warm_up_runs_the_mlp_with_which_a_stage_begins(
    model: ModelSpec, halves: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many rows: the MLP with which a stage begins, and the MLP of its first whole layer."""
    force(monkeypatch, halves)
    original = DecoderLayer.mlp
    seen: set[tuple[int, bool]] = set()

    def mlp(self: DecoderLayer, residual: Residual) -> None:
        if self.mlp_weights is not None and len(residual.hidden_TC) > 1:
            seen.add((self.number, residual.update_TC is None))
        original(self, residual)

    monkeypatch.setattr(DecoderLayer, "mlp", mlp)
    for stage in range(len(halves) + 1):
        stack = load_model(model, "cpu", stage, len(halves) + 1)
        seen.clear()
        warm_up(stack, [DENSE], 128)
        begins = stack.mlps.start < stack.layers.start
        wanted = {(stack.mlps.start, True)} if begins else set()
        if stack.layers.start in stack.mlps:
            wanted.add((stack.layers.start, False))
        assert seen == wanted and (seen or not stack.mlps)
