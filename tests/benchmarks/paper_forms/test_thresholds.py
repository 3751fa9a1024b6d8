"""Tests thresholds by coverage and by the model's performance against their definitions, on a tiny model."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.benchmarks.accuracy.predictions import predicted
from deltafront.benchmarks.paper_forms import coverage, minimum_threshold
from deltafront.benchmarks.paper_forms.coverage import (
    THRESHOLDS,
    coverages,
    covered,
    least_thresholds,
    true_masses,
)
from deltafront.benchmarks.paper_forms.levels import level_of, write_profile
from deltafront.benchmarks.paper_forms.minimum_threshold import MEASURED, QUOTAS, Performance, head_losses
from deltafront.kernels.build import build
from deltafront.kernels.interface import no_phase
from deltafront.kernels.methods import load, method_spec
from deltafront.tests.numerics import chunk_of, spec_of
from deltafront.tests.reference.selection import kept_tiles
from deltafront.tests.reference.structured import structured_input
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely
from deltafront.workers.calibration.method_levels import require_thresholds, selector_of
from deltafront.workers.calibration.probes import Document, Question, with_answers
from deltafront.workers.calibration.thresholds import ADJUSTMENTS, FACTOR, START
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Level, load_profile
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.settings import ModelSpec

from ...workers.tiny_model import make_tiny_model, whole_stack

load("deltafront.benchmarks.paper_forms.methods")
THESIS = method_spec("dpxa_thesis", {"min_tokens": 0})
PAPER = method_spec("xattention_paper", {"min_tokens": 0})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stack(directory: Path) -> LayerStack:
    return whole_stack(directory)


def made(seed: int, tokens: int) -> Document:
    ids = random.Random(seed).choices(range(199), k=tokens)
    return Document(ids, [Question("it", tuple(ids[5:9]), tuple(ids[9:13]))])


def test_true_tile_masses_equal_a_softmax_over_all_keys() -> None:
    x = structured_input(300, q_heads=4, kv_heads=2, head_dim=16)
    for part in (x, chunk_of(x, 128, 300)):
        k = part.k_BGSD.double().repeat_interleave(2, 1)
        logit = part.q_BHTD.double() @ k.transpose(2, 3) * part.scale
        position = torch.arange(part.q_start, 300)[:, None]
        mass = logit.masked_fill(torch.arange(300) > position, float("-inf")).softmax(-1)
        found = true_masses(part)
        for n, rows in enumerate(mass.split(128, dim=2)):
            for m, tile in enumerate(rows.split(128, dim=3)):
                torch.testing.assert_close(
                    found[:, :, n, m].double(), tile.sum(-1).mean(-1), atol=1e-6, rtol=1e-5
                )


def test_coverage_is_the_mean_mass_of_the_kept_tiles() -> None:
    x = structured_input(1300, q_heads=2, kv_heads=1, head_dim=16)
    selector = selector_of(THESIS)
    score_BHNM = selector.scores(x, selector.new_state(spec_of(x)), no_phase)
    true_BHNM = true_masses(x)
    found_HI = covered(score_BHNM, true_BHNM, selector.rule)
    for place in (5, 40, 63):
        for h in range(2):
            shares = [
                sum(float(true_BHNM[0, h, n, m]) for m in kept_tiles(row, n, "cumulative", THRESHOLDS[place]))
                for n, row in enumerate(score_BHNM[0, h].tolist())
            ]
            assert float(found_HI[h, place]) == pytest.approx(sum(shares) / len(shares), abs=1e-5)


def test_chooses_the_smallest_threshold_with_enough_coverage() -> None:
    coverage_LHI = torch.linspace(0.5, 1.0, 64).expand(1, 2, 64).clone()
    coverage_LHI[0, 1] = 0.4
    coverage_LHI[0, 1, -1] = 1.0
    ((first, second),) = least_thresholds(coverage_LHI, 0.75)
    place = THRESHOLDS.index(first)
    assert coverage_LHI[0, 0, place] >= 0.75 > coverage_LHI[0, 0, place - 1]
    assert second == 1.0


def test_thresholds_reach_the_requested_coverage_in_every_head(stack: LayerStack) -> None:
    document = made(1, 900)
    found_LHI = coverages(stack, document, selector_of(THESIS))
    config = stack.config
    assert found_LHI.shape == (config.layers, config.q_heads, len(THRESHOLDS))
    assert bool((found_LHI.diff(dim=-1) >= -1e-9).all())
    levels = [level_of(stack, [document], THESIS, least_thresholds(found_LHI, r)) for r in (0.75, 0.9)]
    assert 0 < levels[0].density < levels[1].density <= 1
    for row, r in zip(levels, (0.75, 0.9), strict=True):
        for layer, heads in enumerate(row.thresholds):
            for head, threshold in enumerate(heads):
                assert float(found_LHI[layer, head, THRESHOLDS.index(threshold)]) >= r - 1e-9


def test_reads_back_the_thresholds_of_a_written_profile(
    stack: LayerStack, directory: Path, tmp_path: Path
) -> None:
    document = made(2, 900)
    thresholds = [[0.25 + 0.01 * (layer + head) for head in range(stack.config.q_heads)]
                  for layer in range(stack.config.layers)]  # fmt: skip
    level = level_of(stack, [document], THESIS, thresholds)
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged.")
    arguments = Namespace(
        model=str(directory), no_adapter=True, dtype="float32", text=[text], tokens=900,
        profile=tmp_path / "profile.json",
    )  # fmt: skip
    write_profile(arguments, PAPER, [level])
    write_profile(arguments, THESIS, [level])
    profile = load_profile(ModelSpec(path=str(directory), dtype="float32", profile=str(arguments.profile)))
    assert profile is not None and [one.method for one in profile.prefill] == [PAPER.name, THESIS.name]
    assert len(profile.texts) == 1
    asked = method_spec("dpxa_thesis", {"min_tokens": 0, "density": level.density})
    found = thresholds_for(profile, asked)
    assert found is not None and found(1, 900) == thresholds[1]
    x = structured_input(900, q_heads=stack.config.q_heads, kv_heads=stack.config.kv_heads, head_dim=16)
    method = build(asked, found)
    assert not method.new_state(spec_of(x)).selector.rule.outside


def test_calibrate_refuses_methods_that_include_sink_mass_in_levels() -> None:
    for method in (THESIS, PAPER):
        with pytest.raises(ValueError, match=r"paper_forms\.coverage"):
            require_thresholds(method)
    require_thresholds(method_spec("dpxa"))


def test_performance_equals_a_prefill_with_one_threshold_changed(stack: LayerStack) -> None:
    document = made(3, 700)
    measured = Performance(stack, document, PAPER)
    ids, answers = with_answers(document)

    def whole(layer: int, head: int, quota: float) -> float:
        """Prefill from the start with one head's threshold changed."""
        heads = stack.config.q_heads

        def hook(at: int, x):  # type: ignore[no-untyped-def]
            given = [quota if (at, h) == (layer, head) else START for h in range(heads)]
            spec = method_spec(PAPER.name, {**PAPER.values, "density": 1.0})
            return attended(build(spec, lambda _layer, _tokens: given), x, at)

        hidden_TC = read_densely(stack, embedded(stack, ids), hook)
        gold = torch.tensor([ids[place + 1] for place in answers])
        return float(predicted(stack, hidden_TC[answers], gold)[0].mean())

    assert measured.unadjusted == pytest.approx(whole(0, 0, START), abs=1e-6)
    for layer, head in ((0, 1), (stack.config.layers - 1, 0)):
        assert measured.adjusted(layer, head, QUOTAS[0]) == pytest.approx(
            whole(layer, head, QUOTAS[0]), abs=1e-6
        )
    assert bool((measured.density_LHI.diff(dim=-1) >= 0).all())


def test_performance_loss_is_measured_for_each_head_alone(stack: LayerStack) -> None:
    measured = [Performance(stack, made(seed, 500), PAPER) for seed in (4, 5)]
    heads = stack.config.q_heads
    loss_HI = head_losses(measured, 1, heads)
    assert loss_HI.shape == (heads, len(MEASURED)) and bool((loss_HI[:, -1] == 0).all())
    expected = sum(one.unadjusted - one.adjusted(0, 1, QUOTAS[1]) for one in measured) / 2
    assert float(loss_HI[1, 1]) == pytest.approx(expected)
    assert QUOTAS[0] == pytest.approx(START * FACTOR**ADJUSTMENTS)


def test_refuses_documents_without_questions(stack: LayerStack) -> None:
    with pytest.raises(ValueError, match="give --questions"):
        Performance(stack, Document(made(1, 300).ids, []), PAPER)


@pytest.mark.parametrize("command", [coverage, minimum_threshold])
def test_calibration_scripts_write_one_level_per_requested_target(
    command: Any, stack: LayerStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    written: list[Level] = []
    monkeypatch.setattr(command, "load_model", lambda *_: stack)
    monkeypatch.setattr(command, "documents_of", lambda _: [made(6, 700)])
    monkeypatch.setattr(command, "write_profile", lambda _arguments, _method, levels: written.extend(levels))
    asked = ["--coverage", "0.9", "0.7"] if command is coverage else ["--density", "0.95", "0.8"]
    command.main(["--no-adapter", "--profile", str(tmp_path / "profile.json"), *asked])
    assert len(written) == 2 and 0 < written[0].density <= written[1].density <= 1
    assert f"density={written[1].density}" in capsys.readouterr().out
    for level in written:
        assert len(level.thresholds) == stack.config.layers
        assert {len(row) for row in level.thresholds} == {stack.config.q_heads}
