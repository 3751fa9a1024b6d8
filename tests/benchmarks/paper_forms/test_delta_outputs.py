"""Cosines, ranks and Lemma 1's error and bound, against their definitions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.benchmarks.paper_forms import delta_outputs
from deltafront.benchmarks.paper_forms.delta_outputs import (
    LastRows,
    best,
    cosine,
    figures,
    last_rows,
    lemma_1,
    main,
    rank_correlations,
    tables,
)
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.model_config import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec

from ...workers.tiny_model import make_tiny_model


def random_rows(seed: int) -> LastRows:
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, 3, 8), (4, 3, 8), (2, 50, 8)
    return LastRows(*(torch.randn(shape, generator=generator) for shape in shapes))


def test_rank_correlation_equals_spearmans() -> None:
    mine, dense = random_rows(1), random_rows(2)
    found = []
    for h in range(4):
        for row in range(3):
            places = []
            for one in (mine, dense):
                logits = [float(one.q_HRD[h, row] @ key) for key in one.k_GSD[h // 2]]
                places.append([sorted(logits).index(logit) for logit in logits])
            pair = torch.tensor(places, dtype=torch.float64)
            found.append(float(torch.corrcoef(pair)[0, 1]))
    turned = LastRows(dense.out_HRD, -dense.q_HRD, dense.k_GSD)
    each = rank_correlations([mine, dense, turned], dense)
    assert each == pytest.approx([sum(found) / 12, 1.0, -1.0])


def test_outputs_are_compared_row_by_row() -> None:
    mine, dense = random_rows(1), random_rows(2)
    each = [
        float(torch.cosine_similarity(mine.out_HRD[h, row], dense.out_HRD[h, row], dim=0))
        for h in range(4)
        for row in range(3)
    ]
    assert cosine(mine, dense) == pytest.approx(sum(each) / 12, abs=1e-6)


def test_error_and_bound_equal_lemma_1() -> None:
    generator = torch.Generator().manual_seed(3)
    logit_RS, v_SD = torch.randn(5, 40, generator=generator) * 3, torch.randn(40, 4, generator=generator)
    kept_RS = torch.rand(5, 40, generator=generator) < 0.3
    kept_RS[:, 0] = True
    logit_RS[:, 35:], kept_RS[:, 35:] = -math.inf, False
    error_RD, bound_RD = lemma_1(logit_RS, v_SD, kept_RS)
    for row in range(5):
        power = [math.exp(logit) for logit in logit_RS[row].double().tolist()]
        keys, v = [key for key in range(40) if kept_RS[row, key]], v_SD.double()
        tail = sum(power[key] for key in keys)
        head = sum(power) - tail
        for d in range(4):
            dense = sum(power[key] * float(v[key, d]) for key in range(40)) / (head + tail)
            sparse = sum(power[key] * float(v[key, d]) for key in keys) / tail
            missing = sum(power[key] * float(v[key, d]) for key in range(40) if key not in keys)
            left = abs(dense - sparse - missing / (head + tail))
            assert float(error_RD[row, d]) == pytest.approx(left, rel=1e-9, abs=1e-12)
            largest = max(abs(float(v[key, d])) for key in keys)
            assert float(bound_RD[row, d]) == pytest.approx(head / (head + tail) * largest)
    assert (error_RD <= bound_RD).all()


def test_best_keys_are_those_of_the_largest_logits() -> None:
    logit_RS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 2.0, -math.inf]])
    kept_RS = best(logit_RS, torch.tensor([3, 1]))
    assert kept_RS.tolist() == [[False, True, True, True], [True, False, False, False]]


@pytest.fixture
def stack(tmp_path: Path) -> LayerStack:
    config = read_config(directory := make_tiny_model(tmp_path))
    every = range(config.layers)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    return load_stack(directory, StackSpec(config=config, layers=every, embedding=True, head=True, **where))


IDS = random.Random(2).choices(range(199), k=800)


def test_compares_the_rows_before_the_end_of_a_document(stack: LayerStack) -> None:
    (near, far) = last_rows(stack, IDS, "dense", [slice(600, 728), slice(400, 528)])
    assert len(near) == len(far) == stack.config.layers
    assert near[0].out_HRD.shape[1] == 128
    assert (near[0].k_GSD.shape[1], far[0].k_GSD.shape[1]) == (600, 400)
    assert torch.equal(far[1].k_GSD, near[1].k_GSD[:, :400])
    (alone,) = last_rows(stack, IDS, "dense", [slice(400, 528)])
    for layer in range(stack.config.layers):
        assert torch.equal(alone[layer].out_HRD, far[layer].out_HRD)
        assert torch.equal(alone[layer].q_HRD, far[layer].q_HRD)


def test_method_that_keeps_every_tile_equals_dense(stack: LayerStack) -> None:
    found = figures(stack, IDS, ["streaming", "streaming:sink=1,window=100"], [72, 272])
    assert [one["before"] for one in found] == [72, 272]
    for one in found:
        whole, short = one["methods"].values()
        assert whole["cosine"] == pytest.approx([1.0] * stack.config.layers, abs=1e-5)
        assert short["cosine"][-1] < 0.999
        assert short["ranks"][0] == 1.0, "the first layer's queries and keys are the same"
        assert short["ranks"][-1] < 1.0
        for sums in one["lemma"].values():  # 800 tokens are within streaming's window
            assert sums["error"] < 1e-6


def test_tables_are_means_over_documents() -> None:
    def of(cosine: float, error: float, most: float) -> dict[str, Any]:
        lemma = {"streaming": {"error": error, "bound": 1.0, "most": most}}
        return {
            "before": 0,
            "methods": {"m": {"cosine": [cosine, 0.5], "ranks": [0.25, 0.75]}},
            "lemma": lemma,
        }

    text = tables([of(0.5, 0.2, 0.9), of(0.7, 0.4, 0.3)])
    assert "2 documents, 128 rows that end 0 before the last" in text
    assert "| 0 | 0.600 ± 0.100 | 0.250 ± 0.000 |" in text
    assert "| all | 0.550 ± 0.050 | 0.500 ± 0.000 |" in text
    assert "| streaming | 0.30000 ± 0.10000 | 1.00000 ± 0.00000 | 0.900 |" in text


def test_skips_documents_that_the_result_file_holds(
    tmp_path: Path, stack: LayerStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delta_outputs, "documents_of", lambda _: [Document(IDS[:240], ())] * 3)
    monkeypatch.setattr(delta_outputs, "load_model", lambda *_: stack)
    out = tmp_path / "out.jsonl"
    command = ["--out", str(out), "--before", "0", "64", "--methods", "streaming"]
    command += ["--text", "first.txt", "second.txt", "third.txt"]
    main([*command, "--shard", "1/2"])
    assert capsys.readouterr().out == "second: read\n"
    main(command)
    assert capsys.readouterr().out == "first: read\nthird: read\n"
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    names = "second", "first", "third"
    assert [(one["document"], one["before"]) for one in kept] == [
        (name, n) for name in names for n in (0, 64)
    ]
    main(["--tables", str(out)])
    assert capsys.readouterr().out.count("3 documents, 128 rows") == 2
