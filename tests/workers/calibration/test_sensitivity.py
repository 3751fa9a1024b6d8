"""Tests the costs of layers against the divergence of two prefills of the same ids."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import method_spec
from deltafront.workers.calibration import sensitivity
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely
from deltafront.workers.calibration.probes import Document, Question, with_answers
from deltafront.workers.calibration.sensitivity import layer_costs
from deltafront.workers.model.decoder.stack import LayerStack

RNG = random.Random(4)
IDS = RNG.choices(range(199), k=300)
QUESTIONS = [
    Question("one", tuple(RNG.choices(range(199), k=5)), tuple(RNG.choices(range(199), k=3))),
    Question("two", tuple(RNG.choices(range(199), k=2)), (17,)),
]
STREAMING = method_spec("streaming", {"sink": 1, "window": 1, "min_tokens": 0})


def test_appends_questions_and_answers_to_the_document() -> None:
    ids, places = with_answers(Document(IDS, QUESTIONS))
    assert ids == [*IDS, *QUESTIONS[0].prompt, *QUESTIONS[0].gold, *QUESTIONS[1].prompt, 17]
    assert [ids[place + 1] for place in places] == [*QUESTIONS[0].gold, 17]


def test_layer_cost_is_the_divergence_of_one_sparse_layer(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "TAIL", 40)
    found = layer_costs(tiny_stack, Document(IDS, QUESTIONS), build(STREAMING))
    ids, places = with_answers(Document(IDS, QUESTIONS))
    logits = tiny_stack.logits(read_densely(tiny_stack, embedded(tiny_stack, ids), lambda _layer, _x: None))
    dense = logits.log_softmax(-1, dtype=torch.float64)
    # GEMMs of the two prefills have different shapes, so each layer's sums of about 100 products are rounded
    # in different orders.
    logit_error = 16 * torch.finfo(torch.float32).eps * float(logits.abs().max())
    for sparse in tiny_stack.layers:

        def look(layer: int, x: AttentionInput, sparse: int = sparse) -> torch.Tensor | None:
            if layer != sparse:
                return None
            whole = attended(build(method_spec("dense")), x, layer)
            whole[:, :, : len(IDS)] = attended(build(STREAMING), x, layer)[:, :, : len(IDS)]
            return whole

        read = read_densely(tiny_stack, embedded(tiny_stack, ids), look)
        changed = tiny_stack.logits(read).log_softmax(-1, dtype=torch.float64)
        kl = (dense.exp() * (dense - changed)).sum(-1)
        for cost, plain in (
            (found.tail_L[sparse], kl[len(IDS) - 40 : len(IDS)].mean()),
            (found.answer_L[sparse], kl[places].mean()),
        ):
            # A logit error d changes KL(p, q) by at most d·Σ|p - q| + d², and Σ|p - q| ≤ √(2 KL).
            bound = 2 * logit_error * math.sqrt(2 * max(float(plain), 0.0)) + (2 * logit_error) ** 2
            assert abs(cost - plain) <= bound
        assert float(found.tail_L[sparse]) > 0
    assert found.answer_L[:-1].min() > 0 and found.answer_L[-1] == 0, "questions are read densely"
    unasked = layer_costs(tiny_stack, Document(IDS, []), build(STREAMING))
    assert not unasked.answer_L.any() and unasked.tail_L.min() > 0
