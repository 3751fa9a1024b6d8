"""`deltafront evaluate` on a tiny model with random weights, from the command to what `serve` does."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from deltafront.kernels.methods import method_spec
from deltafront.service.cli.calibrate import calibrate_command
from deltafront.service.cli.evaluation.command import BUILT_IN, _Source, evaluate_command
from deltafront.service.cli.serve import describe_attention, read_settings
from deltafront.service.config import ConfigError, parse
from deltafront.service.wiring import check_start
from deltafront.workers.calibration.curves import forced_density
from deltafront.workers.calibration.documents import ANSWER_TOKENS
from deltafront.workers.calibration.method_levels import selector_of
from deltafront.workers.evaluation import answering
from deltafront.workers.evaluation.calibration import densities, halves
from deltafront.workers.evaluation.evaluation import Evaluation
from deltafront.workers.model.calibrated.profile import Measured, Profile, ProfiledText, load_profile
from deltafront.workers.settings import ModelSpec

from ...workers.profiles import make_profile, write_profile
from ...workers.tiny_hybrid import make_tiny_hybrid
from ...workers.tiny_model import make_tiny_model
from ..inprocess import VOCABULARY, write_tokenizer

EVERYTHING = "streaming:min_tokens=0,window=4096@2"
LITTLE = "streaming:min_tokens=0,window=128,sink=128"
PROSE = "It is a text of many sentences. They say nothing. " * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte."""
    directory = make_tiny_model(tmp_path_factory.mktemp("evaluated") / "tiny", vocabulary=VOCABULARY)
    write_tokenizer(directory)
    return directory


def run(model: Path, *arguments: Any, setting: str = LITTLE) -> Result:
    app = typer.Typer()
    app.command()(evaluate_command)
    given = ("--device", "cpu", "--answer-tokens", 4, "--length", 1500, "--setting", setting, *arguments)
    return CliRunner().invoke(app, [str(model), *map(str, given)])


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Questions on sixteen documents, without right answers."""
    file = tmp_path / "own.jsonl"
    lines = [
        {"document": f"{number} {PROSE[:900]}", "question": f"What is {number}?"} for number in range(16)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_prints_a_table_and_writes_a_profile_that_serve_reads(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    """The model answers at random, so that what loses keys loses dense attention's answers."""
    profile, plot = tmp_path / "profile.json", tmp_path / "plot.svg"
    done = run(model, "--questions", questions, "--profile", profile, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert "Verdict: dense: no setting is shown to keep 0.97" in done.output
    assert f"Nearest: {LITTLE} at density" in done.output
    assert ET.fromstring(plot.read_text()).tag.endswith("svg") and LITTLE in plot.read_text()
    found = load_profile(ModelSpec(path=str(model), dtype="float32", profile=str(profile)))
    assert found is not None and found.measured is not None
    assert (found.measured.method, found.measured.recompute_blocks) == ("dense", 0)
    settings = parse(
        {"model": {"path": str(model), "profile": str(profile)}, "decode": {"page_selection": "full"}}
    )
    assert settings.default_attention.method == "dense" and settings.default_attention.measured
    assert "; measured: dense: no setting is shown" in describe_attention(settings)


def test_runs_of_similar_keys_are_printed_and_kept_in_the_profile(
    model: Path, questions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny model has four layers. With a cosine of -1 all keys of a block are one run."""
    profile = tmp_path / "profile.json"
    setting = "dpxa:min_tokens=0,cos=-1"
    done = run(model, "--questions", questions, "--profile", profile, "--setting", setting)
    assert done.exit_code == 0, done.output
    said = "dpxa: 1.0 runs of similar keys a block, by layer 1.0"
    assert said in done.output and "fewer than 4 runs of similar keys a block in layers 0" in done.output
    spec = {"path": str(model), "profile": str(profile)}
    found = load_profile(ModelSpec(dtype="float32", **spec))
    assert found is not None and set(found.runs) == {"dpxa"} and set(found.runs["dpxa"]) == {1.0}
    served = {"model": spec, "decode": {"page_selection": "full"}, "door": {"default_method": "dpxa"}}
    check_start(parse(served))
    assert "dpxa: fewer than 4 runs of similar keys a block" in caplog.text


def test_rows_are_repeated_exactly_with_the_same_seed(model: Path, tmp_path: Path) -> None:
    """RULER's tasks from the built-in text; time for one prompt alone, and for one setting."""
    assert BUILT_IN.is_file()
    made = []
    for seed in (1, 1, 2):
        done = run(model, "--minutes", 1e-9, "--json", "--seed", seed, "--setting", EVERYTHING)
        assert done.exit_code == 0, done.output
        made.append(json.loads(done.stdout))
        for row in made[-1]["rows"]:
            del row["seconds"]
    assert made[0] == made[1] and made[0] != made[2]
    dense, sparse = made[0]["rows"]
    assert (dense["setting"], sparse["setting"]) == ("dense", LITTLE)
    assert dense["density"] == 1.0 > sparse["density"] and dense["samples"] == sparse["samples"] == 1


def test_setting_that_keeps_all_keys_answers_exactly_as_dense(model: Path, questions: Path) -> None:
    done = run(model, "--questions", questions, "--json", "--setting", EVERYTHING, "--ask", "both")
    assert done.exit_code == 0, done.output
    rows = {row["setting"]: row for row in json.loads(done.stdout)["rows"]}
    for label in (EVERYTHING, f"{EVERYTHING}, session"):
        assert rows[label]["same"] == rows[label]["agreement"] == 1.0
        assert rows[label]["logp"] == pytest.approx(0.0, abs=1e-4)
    assert rows[LITTLE]["logp"] < 0 and {f"{LITTLE}, session"} <= set(rows)


def test_questions_answered_together_give_the_rows_of_each_alone(
    model: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for places in (1, 3):
        monkeypatch.setattr(answering, "places_for", lambda *_, places=places: places)
        done = run(model, "--questions", questions, "--json", "--ask", "both")
        assert done.exit_code == 0, done.output
        made.append(json.loads(done.stdout)["rows"])
    for alone, together in zip(*made, strict=True):
        count = alone["samples"]  # a setting is dropped only after whole batches
        assert 1 < count <= together["samples"] and alone["setting"] == together["setting"]
        assert together["scores"][:count] == alone["scores"] and together["density"] == alone["density"]
        assert together["logps"][:count] == pytest.approx(alone["logps"], abs=1e-5)


def test_evaluates_on_a_users_text_unless_it_calibrated_the_profile(model: Path, tmp_path: Path) -> None:
    text, profile = tmp_path / "mine.txt", tmp_path / "profile.json"
    text.write_text(PROSE)
    write_profile(model, profile, texts=(ProfiledText.of(PROSE, 900),))
    done = run(model, "--text", text, "--profile", profile)
    assert done.exit_code == 1
    assert "--text mine: it calibrated the profile: evaluate on another text" in done.output
    write_profile(model, profile)
    done = run(model, "--text", text, "--profile", profile, "--minutes", 1e-9)
    assert done.exit_code == 0, done.output
    measured, before = Profile.read(profile), ProfiledText.of(PROSE, 1500)
    assert measured.prefill and measured.measured is not None and measured.measured.texts == (before,)


def test_calibrates_on_first_halves_and_evaluates_on_second_ones(model: Path, tmp_path: Path) -> None:
    """Neither a half nor the whole text can be evaluated on afterwards."""
    text, profile = tmp_path / "mine.txt", tmp_path / "profile.json"
    words = " ".join(f"Sentence {number} of this text says {number * 7}." for number in range(150))
    text.write_text(words)
    assert run(model, "--text", text, "--calibrate").exit_code == 1
    read = 1500 - 2 * ANSWER_TOKENS
    level = densities(1500, forced_density(read, selector_of(method_spec("dpxa", {})).rule))[0]
    setting = f"dpxa:density={level},min_tokens=0"
    given = ("--text", text, "--profile", profile, "--minutes", 1e-9, "--json")
    done = run(model, *given, "--calibrate", setting=setting)
    assert done.exit_code == 0, done.output
    rows = {row["setting"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows[setting]["samples"] == 1 and 0 < rows[setting]["density"] < 1
    made = Profile.read(profile)
    first_level = made.prefill[0].levels[0]
    assert (first_level.density, first_level.tokens) == (level, 1500)
    first, second = (halves({"mine": words})[half]["mine"] for half in (0, 1))
    assert first + second == words and made.measured is not None
    assert made.measured.texts == (ProfiledText.of(second, 1500),)
    assert made.texts == (ProfiledText.of(first, 1500), ProfiledText.of(words, 1500))
    for content in (first, words):
        text.write_text(content)
        again = run(model, *given)
        assert again.exit_code == 1 and "it calibrated the profile" in again.output


def test_only_two_texts_are_halved_and_levels_outlive_an_interruption(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = " ".join(f"Sentence {number} of this text says {number * 7}." for number in range(150))
    texts, profile = [tmp_path / f"{name}.txt" for name in "abc"], tmp_path / "profile.json"
    for text in texts:
        text.write_text(f"{text.stem} {words}")
    source = _Source.of([*map(str, texts)], None, halved=True)
    assert [len(source.texts[name]) < 2 * len(words) / 3 for name in "abc"] == [True, True, False]

    def interrupted(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluation, "run", interrupted)
    done = run(model, "--text", texts[0], "--calibrate", "--profile", profile)
    assert done.exit_code == 1 and "interrupted before" in done.output
    assert Profile.read(profile).prefill[0].levels


def test_levels_of_an_evaluation_are_denser_for_shorter_prompts() -> None:
    assert densities(131_072, forced=0.01) == [0.055, 0.1, 0.17]
    assert densities(31_000, forced=0.046) == [0.098, 0.178, 0.303]
    assert densities(1500, forced=0.8) == [0.83]
    assert densities(1500, forced=0.99) == [1.0]


def test_calibration_refuses_a_text_that_evaluated(model: Path, tmp_path: Path) -> None:
    text, path = tmp_path / "mine.txt", tmp_path / "profile.json"
    text.write_text(PROSE)
    measured = MEASURED.model_copy(update={"texts": (ProfiledText.of(PROSE, 1500),)})
    write_profile(model, path, measured=measured)
    app = typer.Typer()
    app.command()(calibrate_command)
    given = [model, "--text", text, "--profile", path, "--add", "--density", 0.9, "--length", 600]
    done = CliRunner().invoke(app, [str(one) for one in given])
    assert done.exit_code == 1 and "it evaluated the profile: calibrate on another text" in done.output


def test_recalibration_drops_a_measured_setting_that_uses_thresholds(model: Path) -> None:
    by_level = MEASURED.model_copy(update={"method": "dpxa", "options": {"density": 0.3}})
    for measured, kept in ((MEASURED, MEASURED), (by_level, None)):
        profile = make_profile(model, measured=measured)
        assert profile.plus(profile.prefill[0], ()).measured == kept


MEASURED = Measured(
    method="dpxa+delta",
    options={"share": 0.2, "gamma": 32},
    recompute_blocks=32,
    tokens=(31_000,),
    samples=180,
    density=0.25,
    dense=0.7,
    score=0.7,
    kept=0.99,
    low=0.975,
    high=1.0,
    lost=1,
    won=0,
    verdict="dpxa+delta keeps 0.99",
)


def test_measured_setting_becomes_the_default_of_serve(model: Path, tmp_path: Path) -> None:
    profile = write_profile(model, tmp_path / "profile.json", measured=MEASURED)
    content: dict[str, Any] = {"model": {"path": str(model), "profile": str(profile)}}
    settings = parse(content)
    assert settings.default_attention.method == "dpxa+delta"
    assert settings.default_attention.options == {"share": 0.2, "gamma": 32}
    assert settings.recompute_blocks == 32
    told = "dpxa+delta share=0.2 gamma=32, 32 blocks recomputed; measured: dpxa+delta keeps 0.99"
    assert describe_attention(settings) == told
    own = parse({**content, "door": {"default_method": "xattention"}, "decode": {"recompute_blocks": 4}})
    assert (own.default_attention.method, own.recompute_blocks) == ("xattention", 4)
    assert not own.default_attention.options and "measured" not in describe_attention(own)
    chosen = read_settings(None, str(model), None, profile=profile)
    assert (chosen.default_attention.method, chosen.recompute_blocks) == ("dpxa+delta", 32)
    assert MEASURED.setting == "dpxa+delta:share=0.2,gamma=32@32"


def test_serve_takes_a_profile_without_a_configuration_only(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: m}\ndecode: {page_selection: full}\n")
    with pytest.raises(ConfigError, match=r"--profile: with --config set model\.profile"):
        read_settings(file, None, None, profile=tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "nope"}, "measured.method: unknown attention method 'nope'"),
        ({"options": {"tau": 7.0}}, "measured.method_options.tau: .* is outside"),
        ({"texts": (ProfiledText(sha256="ab" * 32, tokens=9),)}, "measured.texts: abababababab calibrated"),
    ],
)
def test_refuses_a_profile_whose_measurement_cannot_be_served(
    model: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        write_profile(model, tmp_path / "profile.json", measured=MEASURED.model_copy(update=changes))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--setting", "dpxa:tau=9"), "tau = 9.0 is outside"),
        (("--length", 99_999), "--length 99999: the model's positions leave 4092 for a prompt"),
        (("--questions", "absent.jsonl"), "absent.jsonl cannot be read"),
        (("--profile", "/nowhere/profile.json"), "there is no directory /nowhere"),
    ],
)
def test_evaluate_says_what_is_wrong_with_its_arguments(
    model: Path, arguments: tuple[Any, ...], says: str
) -> None:
    done = run(model, *arguments)
    assert done.exit_code == 1 and says in " ".join(done.output.split())


@pytest.mark.parametrize("ask", ["prompt", "session"])
def test_evaluates_a_model_with_linear_attention(questions: Path, tmp_path: Path, ask: str) -> None:
    """Its attention layers are sparse, and no block is recomputed."""
    hybrid = make_tiny_hybrid(tmp_path / "hybrid", vocabulary=VOCABULARY)
    write_tokenizer(hybrid)
    done = run(hybrid, "--questions", questions, "--ask", ask)
    assert done.exit_code == 0, done.output
    assert re.search(rf"Nearest: {LITTLE}.* at density 0\.\d+ keeps 0\.", done.output)
    refused = run(hybrid, "--setting", EVERYTHING)
    assert refused.exit_code == 1 and "recomputes no blocks" in " ".join(refused.output.split())
