"""Measures a dense row's difference at the rows behind it, against the correction itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.paper_forms.delta_decay import Held, held, row
from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import method_spec
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.directory.model_config import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec

from ...workers.tiny_model import make_tiny_model


def test_sums_equal_those_of_each_row() -> None:
    difference = torch.randn(2, 50, 4)
    facts = [range(3, 6), range(21, 27), range(40, 50)]
    sums = Held()
    sums.add(difference, 8, 12, facts)
    cosines, before, after = [], 0.0, 0.0
    for t in range(16, 50):
        for h in range(2):
            mine, dense = difference[h, t], difference[h, t // 8 * 8]
            before += float(mine.square().sum())
            after += float((mine - dense).square().sum())
            if t % 8:
                cosines.append(float(torch.nn.functional.cosine_similarity(mine, dense, dim=0)))
    assert sums.cosine / sums.rows == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    assert (sums.before, sums.after) == pytest.approx((before, after), rel=1e-5)
    counted = [range(21, 27), range(40, 50)]  # the first fact's dense row is read whole
    at_once = sum(
        float((difference[:, t] - difference[:, fact.start]).square().sum()) for fact in counted for t in fact
    )
    assert sums.facts_at_once == pytest.approx(at_once, rel=1e-5)


def test_constant_difference_is_corrected_completely() -> None:
    sums = Held()
    sums.add(torch.ones(1, 64, 4), 16, 0, [range(3, 9)])
    assert row(16, [sums]) == "| 16 | 1.000 | 0.000 | 0.000 | 0.000 |"
    assert row(16, [Held()]) == "| 16 | – | – | – | – |"


def test_reports_an_interval_over_several_documents() -> None:
    one, other = (Held(cosine=cosine, rows=10, before=1.0, after=1.0) for cosine in (2.0, 6.0))
    assert row(8, [one, other]) == "| 8 | 0.400 (0.200 to 0.600) | 1.000 (1.000 to 1.000) | – | – |"


def test_remaining_error_equals_that_of_the_corrected_output(tmp_path: Path) -> None:
    """One layer's attention, over the rows before the correction's dense end."""
    config = read_config(directory := make_tiny_model(tmp_path))
    every = range(config.layers)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    stack = load_stack(directory, StackSpec(config=config, layers=every, embedding=True, head=True, **where))
    document = Document(random.Random(2).choices(range(199), k=896), [])
    errors = {"streaming": 0.0, "streaming+delta": 0.0}
    options = {"sink": 1, "window": 100, "min_tokens": 0}
    first = 256  # block 2 is the first that does not see block 0 by its window; the sink's tile is one

    def hook(layer: int, x: AttentionInput) -> None:
        dense = attended(build(method_spec("dense")), x, layer)
        for name in errors:
            more = {"gamma": 32} if "+" in name else {}
            found = attended(build(method_spec(name, {**options, **more})), x, layer)
            errors[name] += float((found - dense)[:, :, first:768].square().sum())

    read_densely(stack, embedded(stack, document.ids), hook)
    (sums,) = held(stack, document, "streaming:sink=1,window=100", [32]).values()
    tail = Held()

    def rest(layer: int, x: AttentionInput) -> None:
        dense = attended(build(method_spec("dense")), x, layer)
        sparse = attended(build(method_spec("streaming", options)), x, layer)
        tail.add((dense - sparse)[0], 32, 768, [])

    read_densely(stack, embedded(stack, document.ids), rest)
    assert sums.after - tail.after == pytest.approx(errors["streaming+delta"], rel=0.02)
    assert sums.before - tail.before == pytest.approx(errors["streaming"], rel=0.02)
