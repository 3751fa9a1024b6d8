"""Tests whole runs of `benchmarks.lab` on a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.benchmarks.lab.__main__ import main
from deltafront.benchmarks.lab.arguments import rope_scaling_of
from deltafront.benchmarks.lab.delta_forms import attended, changes, seen_keys
from deltafront.benchmarks.lab.delta_forms import main as forms
from deltafront.benchmarks.lab.samples import in_turn, ruler_prompts
from deltafront.benchmarks.reader import load_tokenizer
from deltafront.kernels.methods import method_spec
from deltafront.tests.numerics import random_input
from deltafront.tests.service.inprocess import VOCABULARY, write_tokenizer
from deltafront.tests.workers.tiny_model import HEADS, LAYERS, make_tiny_model
from deltafront.workers.evaluation.prompts import read_prompts
from deltafront.workers.model.calibrated.profile import (
    Level,
    MethodLevels,
    Profile,
    ProfiledModel,
    shaping_options,
)
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.settings import ModelSpec

SPARSE = "streaming:min_tokens=0,window=128"
PAGED = "dense/delta_layers=2,page_budget=10"
YARN = "factor=4,original_max_position_embeddings=512"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, 512 positions."""
    directory = make_tiny_model(tmp_path_factory.mktemp("lab") / "tiny", VOCABULARY, positions=512)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts of two tasks, longer than the model's positions."""
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"{n} " + "It is a text. " * 45, "answers": ["never"], "task": task}
        for n, task in enumerate(("a", "a", "b"))
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def run(model: Path, prompts: Path, result: Path, *more: str) -> dict[str, Any]:
    given = f"--model {model} --prompts {prompts} --result {result} --rope-scaling {YARN} --dtype float32"
    how = "--device cpu --answer-tokens 5 --together 1 --commit c --settings"
    assert main([*given.split(), *how.split(), *more]) == 0
    written: dict[str, Any] = json.loads(result.read_text())
    return written


def test_all_forms_of_delta_correction_give_the_same_dense_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = random_input(300, q_heads=2, kv_heads=1, head_dim=16)
    causal_TS = torch.ones(300, 300, dtype=torch.bool).tril()
    dense = attended(x, causal_TS)
    sparse = attended(x, seen_keys("streaming:min_tokens=0,window=1,sink=1", x))
    for change_HTD in changes(dense, sparse, 16).values():
        torch.testing.assert_close((sparse[0] + change_HTD)[:, ::16], dense[0][:, ::16])
    for change_HTD in changes(dense, dense, 16).values():
        torch.testing.assert_close(change_HTD, torch.zeros_like(change_HTD))
    text, result = tmp_path / "text.txt", tmp_path / "forms.json"
    text.write_text(" ".join(f"Sentence {n} tells of nothing." for n in range(90)))
    given = f"--model {model} --text {text} --result {result} --tokens 900 --samples 2 --tasks single_1"
    methods = ["--methods", "streaming:min_tokens=0,window=1,sink=1"]
    assert (
        forms([*given.split(), "--rope-scaling", YARN, "--dtype", "float32", "--device", "cpu", *methods])
        == 0
    )
    rows = {(row["gamma"], row["form"]): row["error left"] for row in json.loads(result.read_text())["rows"]}
    assert len(rows) == 2 * 9
    assert 0.7 < rows[16, "equation 5"] < rows[64, "equation 5"] < 1
    del capsys


def test_written_prompts_are_read_back_as_they_were(model: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "prompts.jsonl"
    text.write_text(" ".join(f"Sentence {n} tells of nothing." for n in range(90)))
    given = f"--model {model} --text {text} --tokens 2500 --samples 2 --tasks multivalue variables"
    assert main([*given.split(), "--write-prompts", str(file)]) == 0
    made = in_turn(
        ruler_prompts(["multivalue", "variables"], 2, 2500, [text], load_tokenizer(str(model)), 11)
    )
    read = read_prompts(file)
    assert [(one.text, one.task, one.answers) for one in read] == [
        (one.text, one.task, one.answers) for one in made
    ]
    assert len({one.source for one in read}) == 4


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "seconds": None} for row in rows]


def test_a_stopped_run_continues_without_repeating_answers(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    result, answers = tmp_path / "lab.json", tmp_path / "lab.answers.jsonl"
    whole = run(model, prompts, result, PAGED, SPARSE)
    assert [row["samples"] for row in whole["rows"]] == [3, 3, 3]
    assert list(whole["rows"][0]["by_task"]) == ["a", "b"]
    lines = answers.read_text().splitlines(keepends=True)
    kept = "".join(lines[:8])  # the run's description, two samples with all settings and one with one
    answers.write_text(kept + lines[8][:40])
    again = run(model, prompts, result, f"{SPARSE}@1", SPARSE, PAGED)
    assert again["pages_read"] == whole["pages_read"] == {PAGED: (3 * 40 + 2 * 10) / (5 * 40)}
    assert untimed(again["rows"])[:3] == untimed(whole["rows"])
    assert again["rows"][3]["setting"] == f"{SPARSE}@1" and again["rows"][3]["samples"] == 3
    assert answers.read_text().startswith(kept)
    assert len(answers.read_text().splitlines()) == 1 + 4 * 3


def profile_of(model: Path, thresholds: float, density: float) -> Profile:
    """Return a profile with one level of `dpxa`, in which all heads have the same threshold."""
    spec = ModelSpec(path=str(model), rope_scaling=rope_scaling_of(YARN))
    level = Level(density=density, tokens=700, share=density, amounts=((thresholds,) * HEADS,) * LAYERS)
    options = shaping_options(method_spec("dpxa", {"window": 1}))
    return Profile(
        format=1,
        model=ProfiledModel(name="tiny", digest=model_digest(spec)),
        texts=(),
        prefill=(MethodLevels(method="dpxa", options=options, levels=(level,)),),
    )


def test_levels_of_a_profile_hold_with_the_delta_correction(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A level with one threshold for all heads is the rule `tau` outside sink and window."""
    profile, result = tmp_path / "profile.json", tmp_path / "lab.json"
    prompts.write_text(prompts.read_text().replace("text. ", "text of some letters. "))
    profile_of(model, 0.2, 0.3).write(profile)
    common = "window=1,min_tokens=0,gamma=1024"
    level, tau = (f"dpxa+delta:{rule},{common}" for rule in ("density=0.3", "tau=0.2,outside=1"))
    found = run(model, prompts, result, level, tau, "--profile", str(profile))
    rows = {row["setting"]: row for row in found["rows"]}
    assert rows[level]["density"] == rows[tau]["density"] < 1
    assert rows[level]["logps"] == rows[tau]["logps"] != [0, 0, 0]
    with pytest.raises(SystemExit, match=r"density = 0\.4: the model's profile has 0\.3 for dpxa"):
        run(model, prompts, result, level.replace("0.3", "0.4"), "--profile", str(profile))
    with pytest.raises(SystemExit, match="the model has no profile"):
        run(model, prompts, result, level)
    profile_of(model, 0.5, 0.3).write(profile)
    with pytest.raises(SystemExit, match="has another run's answers: profile is"):
        run(model, prompts, result, level, "--profile", str(profile))
    del capsys


def test_results_record_yarn_and_the_chat_template(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(model, prompts, tmp_path / "plain.json", SPARSE)
    chat = run(model, prompts, tmp_path / "chat.json", SPARSE, "--chat")
    assert plain["rope_scaling"]["factor"] == 4 and not plain["chat"] and chat["chat"]
    assert chat["rows"][0]["logps"] == plain["rows"][0]["logps"] == [0, 0, 0]
    with pytest.raises(SystemExit, match=r"chat.answers.jsonl has another run's answers: chat is True there"):
        run(model, prompts, tmp_path / "chat.json", SPARSE)
    del capsys
