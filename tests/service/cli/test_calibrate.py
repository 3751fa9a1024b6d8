"""Compares `deltafront calibrate` on a tiny model with the function that it calls."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.service.cli.calibrate import calibrate_command
from deltafront.workers.calibration.delta_layers import calibrate
from deltafront.workers.calibration.probes import Document
from deltafront.workers.calibration.thresholds import ADJUSTMENTS, FACTOR, START
from deltafront.workers.model.calibrated.profile import ProfileError, load_profile
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.settings import ModelSpec

from ...workers.tiny_model import LAYERS, make_tiny_model

LEVEL = {"--density": 0.9, "--length": 600, "--profile": "profile.json"}
PROSE = "call me ishmael some years ago never mind how long precisely having little or no money " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with one token per letter."""
    directory = make_tiny_model(tmp_path_factory.mktemp("calibrated"))
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def run(*arguments: Any) -> Result:
    app = typer.Typer()
    app.command()(calibrate_command)
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_prints_delta_layers_as_a_configuration_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE)
    (tmp_path / "two.txt").write_text(PROSE[::-1])
    options = ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400)
    texts = ("--text", tmp_path / "one.txt", "--text", tmp_path / "two.txt")
    done = run(model, *texts, *options)
    assert done.exit_code == 0, done.output
    ids = [
        [ord(letter) - 97 if letter != " " else 26 for letter in text[:400]] for text in (PROSE, PROSE[::-1])
    ]
    stack = load_model(ModelSpec(path=str(model), dtype="float32"), "cpu")
    expected = calibrate(stack, [Document(one, []) for one in ids], 2, budget=6, recency=2)
    assert yaml.safe_load(done.stdout) == {"delta_layers": list(expected.delta_layers)}
    everything = json.loads(run(model, *texts, *options, "--json").stdout)
    assert everything["delta_layers"] == list(expected.delta_layers)
    assert everything["tokens"] == [400, 400]
    assert everything["full_layers"] == [0, 1]
    assert everything["losses"] == [list(row) for row in expected.losses]
    assert len(everything["losses"]) == LAYERS
    other = run(model, *texts, *options, "--full-layer", 3, "--json")
    assert json.loads(other.stdout)["full_layers"] == [3]


def test_a_profile_is_written_for_the_model_with_its_overrides(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE)
    path, options = tmp_path / "profile.json", ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400)
    done = run(
        model,
        "--text",
        tmp_path / "one.txt",
        *options,
        "--rope-theta",
        2e4,
        "--full-layer",
        0,
        "--profile",
        path,
    )
    assert done.exit_code == 0, done.output
    own = ModelSpec(path=str(model), rope_theta=2e4, profile=str(path))
    profile = load_profile(own)
    assert profile is not None and profile.decode is not None
    assert list(profile.decode.delta_layers) == yaml.safe_load(done.stdout)["delta_layers"]
    assert profile.decode.full_layers == (0,)
    assert (profile.decode.page_budget, profile.decode.recency) == (6, 2)
    text = hashlib.sha256(PROSE.encode()).hexdigest()
    assert [(one.sha256, one.tokens) for one in profile.texts] == [(text, 400)]
    assert (profile.model.name, profile.prefill, profile.figures) == (model.name, (), {})
    with pytest.raises(ProfileError, match=r"model\.digest: it was made for"):
        load_profile(dataclasses.replace(own, rope_theta=None))


def test_calibrates_thresholds_for_each_density_and_prompt_length(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE + ". " + PROSE)
    path = tmp_path / "profile.json"
    pages = ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400, "--serving-budget", 9)
    levels = ("--density", 0.8, "--density", 0.9, "--length", 600, "--length", 300, "--method", "xattention")
    done = run(
        model, "--text", tmp_path / "one.txt", *pages, *levels, "--option", "sink=2", "--profile", path
    )
    assert done.exit_code == 0, done.output
    profile = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert profile is not None and profile.decode is not None and profile.decode.page_budget == 9
    (found,) = profile.prefill
    assert found.method == "xattention" and found.options["sink"] == 2
    families = [(level.density, level.tokens) for level in found.levels]
    assert families == [(0.8, 300), (0.9, 300), (0.8, 600), (0.9, 600)]
    assert "600 tokens, document 1 of 1" in done.stderr


def test_a_density_that_is_too_low_costs_no_other_level(model: Path, tmp_path: Path) -> None:
    """0.7133335 is hardly above the share of sink and window, 0.71333, and below the least of the heads."""
    (tmp_path / "one.txt").write_text(PROSE + ". " + PROSE)
    path = tmp_path / "profile.json"
    pages = ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400)
    level = ("--length", 600, "--method", "xattention", "--option", "window=1", "--profile", path)
    low, given = ("--density", 0.7133335), (model, "--text", tmp_path / "one.txt", *pages, *level)
    alone = run(*given, *low)
    assert alone.exit_code == 1 and not path.exists()
    assert "at 600 tokens: it takes a higher density or longer prompts" in " ".join(alone.output.split())
    done = run(*given, *low, "--density", 0.9)
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "no thresholds are as sparse as 0.7133" in said
    assert "--density 0.713333: no thresholds are that sparse at 600 tokens" in said
    found = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert found is not None and [level.density for level in found.prefill[0].levels] == [0.9]


def test_profile_marks_densities_with_xattention_thresholds(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE + ". " + PROSE)
    pages = ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400)
    level = ("--density", 0.9, "--length", 600, "--method", "xattention", "--option", "window=1")
    profiles = []
    for allocation in ("marginal", "threshold"):
        path = tmp_path / f"{allocation}.json"
        given = ("--allocation", allocation, "--profile", path)
        done = run(model, "--text", tmp_path / "one.txt", *pages, *level, *given)
        assert done.exit_code == 0, done.output
        profiles.append(load_profile(ModelSpec(path=str(model), profile=str(path))))
    marginal, threshold = profiles
    assert marginal is not None and threshold is not None
    assert marginal.figures == {"allocation": "marginal"}
    assert threshold.figures == {"allocation": "threshold"}
    of_paper = {round(START * FACTOR**step, 6) for step in range(ADJUSTMENTS + 1)}
    quotas = [quota for row in threshold.prefill[0].levels[0].thresholds for quota in row]
    assert set(quotas) <= of_paper
    assert marginal.prefill[0].levels[0].thresholds != threshold.prefill[0].levels[0].thresholds


def test_layer_search_minimises_the_divergence_of_answers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE.replace("call", ". Call") * 2)
    options = ("--budget", 6, "--recency", 2, "--tokens", 900, "--questions", 2, "--full-layer", 0)
    done = run(model, "--text", tmp_path / "one.txt", *options, "--dense-layers", 3, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    first, *others = found["delta_layers"]
    assert first + 1 + len(others) == 3 and found["divergence"] > 0
    assert "choices read" in done.stderr
    assert "Reading 4 texts" in done.stderr, "needles in the text, needles alone, several values, chains"
    failed = run(model, "--text", tmp_path / "one.txt", *options[:-4], "--full-layer", 0, "--dense-layers", 3)
    assert failed.exit_code == 1 and "needs questions" in failed.stderr


def test_questions_do_not_take_the_tokens_of_the_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE.replace("call", ". Call"))
    options = ("--budget", 6, "--recency", 2, "--layers", 2, "--questions", 4, "--json")
    done = run(model, "--text", tmp_path / "one.txt", *options)
    assert done.exit_code == 0, done.stderr
    assert f"Reading 4 texts of up to {4 * 6 * PAGE_TOKENS} tokens" in done.stderr


def test_calibrate_add_keeps_the_rest_of_the_profile(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE + ". " + PROSE)
    (tmp_path / "two.txt").write_text(PROSE[::-1])
    path, one = tmp_path / "profile.json", ("--text", tmp_path / "one.txt", "--method", "xattention")
    pages = ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400)
    levels = ("--length", 600, "--profile", path)
    assert run(model, *one, *pages, *levels, "--density", 0.8, "--density", 0.9).exit_code == 0
    first = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert first is not None
    both = (*one, "--text", tmp_path / "two.txt")
    done = run(model, *both, *levels, "--length", 400, "--density", 0.9, "--questions", 0, "--add")
    assert done.exit_code == 0 and done.stdout == "", done.output
    again = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert again is not None and again.decode == first.decode and again.figures == first.figures
    (found,) = again.prefill
    assert [(level.density, level.tokens) for level in found.levels] == [(0.9, 400), (0.8, 600), (0.9, 600)]
    assert found.levels[1] == first.prefill[0].levels[0] and found.levels[2] != first.prefill[0].levels[1]
    assert [text.sha256 for text in again.texts][:1] == [text.sha256 for text in first.texts]
    other = run(model, *one, *levels, "--density", 0.9, "--option", "sink=200", "--add")
    assert other.exit_code == 0, other.output
    grown = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert grown is not None and grown.prefill[0] == found
    assert [level.density for level in grown.prefill[1].levels] == [0.9]
    stranger = run(model, *one, *levels, "--density", 0.9, "--rope-theta", 2e4, "--add")
    assert stranger.exit_code == 1 and "model.digest: it was made for" in stranger.stderr
    without = run(model, *one, "--profile", path, "--add")
    assert without.exit_code == 1 and "--add needs --density" in without.stderr
    for given in (("--budget", 6), ("--allocation", "threshold"), ("--json",)):
        idle = run(model, *one, *levels, "--density", 0.9, "--add", *given)
        assert idle.exit_code == 1 and f"leave out {given[0]}" in idle.stderr
    nothing = run(
        model, *one, "--length", 600, "--density", 0.9, "--profile", tmp_path / "none.json", "--add"
    )
    assert nothing.exit_code == 1 and "none.json': `deltafront calibrate" in nothing.stderr


def test_calibrate_add_of_a_length_equals_one_run_with_both_lengths(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROSE + ". " + PROSE)
    path, one = tmp_path / "profile.json", ("--text", tmp_path / "one.txt", "--method", "xattention")
    pages = ("--layers", 2, "--budget", 6, "--recency", 2, "--tokens", 400)
    level = (*one, "--density", 0.8, "--profile", path)
    assert run(model, *level, *pages, "--length", 600).exit_code == 0
    assert run(model, *level, "--length", 400, "--add").exit_code == 0
    added = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert run(model, *level, *pages, "--length", 600, "--length", 400).exit_code == 0
    once = load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert added is not None and once is not None and added.prefill == once.prefill
    shares = [(level.tokens, level.density_at_length) for level in added.prefill[0].levels]
    assert shares == [(400, round(0.8 * 1.5**0.4, 4)), (600, 0.8)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--density": 0.1}, "--density needs --length and --profile"),
        ({"--length": 600}, "--length needs --density"),
        (LEVEL | {"--density": 1.5}, "--density 1.5: must be above 0 and at most 1"),
        (LEVEL | {"--density": "nan"}, "--density nan: must be above 0 and at most 1"),
        (LEVEL | {"--method": "streaming"}, "streaming has no thresholds to calibrate"),
        (LEVEL | {"--length": 0}, "--length 0: must be at least 1"),
        (LEVEL | {"--length": 600, "--positions": 500}, "--length 600: the model has 500 positions"),
        ({"--serving-budget": 1}, "--serving-budget 1: must be at least --recency, 2"),
        ({"--full-layer": LAYERS}, f"full_layers names layer {LAYERS}, but the model has layers 0 .. 4"),
        ({"--allocation": "even"}, "--allocation even: must be marginal or threshold"),
        ({"--option": "sink"}, "--option sink: must be NAME=NUMBER"),
        ({"--option": "depth=3"}, "dpxa has no option 'depth'"),
        ({"--method": "deep"}, "unknown attention method 'deep'"),
        ({"--budget": 40}, "text.txt: 696 tokens are too few for this budget, which takes 1282"),
        ({"--text": "nowhere.txt"}, "nowhere.txt cannot be read: No such file"),
        ({"--recency": 9}, "recency 9 must be positive"),
        ({"--layers": 4}, "4 Δ-layers cannot be chosen"),
        ({"--positions": 300, "--tokens": 400}, "400 tokens are more than the model's 300 positions"),
        ({"--dtype": "int8"}, "'int8' is unknown"),
        ({"--adapter": "/nowhere"}, "no adapter"),
        ({"--profile": "/nowhere/profile.json"}, "/nowhere/profile.json: there is no directory /nowhere"),
        ({"--profile": "/"}, "--profile /: no file can be written there"),
    ],
)
def test_prints_errors_in_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "text.txt").write_text(PROSE)
    monkeypatch.chdir(tmp_path)
    options = {"--text": tmp_path / "text.txt", "--layers": 2, "--budget": 6, "--recency": 2} | change
    done = run(model, *(part for pair in options.items() for part in pair))
    assert done.exit_code == 1
    assert message in done.stderr and "Traceback" not in done.output
    assert "--profile" not in change or "Reading" not in done.stderr, "before the work"


def test_error_names_a_path_that_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(PROSE)
    done = run(tmp_path / "none", "--text", tmp_path / "text.txt")
    assert done.exit_code == 1 and "no model" in done.stderr
