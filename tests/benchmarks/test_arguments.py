"""Tests the benchmarks' command lines: they report errors before measuring, and keep results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks import kernels, tables
from deltafront.benchmarks.accuracy import served
from deltafront.benchmarks.accuracy.__main__ import _arguments, _load
from deltafront.benchmarks.beside_flashinfer import __main__ as beside_flashinfer
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import split_method

from ..workers.tiny_model import make_tiny_model, whole_stack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def given(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("--methods", "dpxa:tau", "no method 'dpxa:tau'"),
        ("--methods", "dpxa:tua=0.9", "dpxa has no option 'tua'"),
        ("--methods", "dxpa", "unknown attention method 'dxpa'"),
        ("--documents", "4096", "no documents '4096'"),
        ("--documents", "0x4096", "no documents '0x4096'"),
        ("--tasks", "needle:16", "no task 'needle:16'"),
        ("--tasks", "needles:few", "no task 'needles:few'"),
        ("--gate", "dpxa:exact>0.9", "no gate 'exact>0.9'"),
        ("--shard", "3/3", "no shard '3/3'"),
        ("--shard", "one", "no shard 'one'"),
    ],
)
def test_accuracy_refuses_bad_arguments_with_a_reason(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, name, value)
    with pytest.raises(SystemExit, match="2"):
        _arguments()
    assert f"argument {name}: {told}" in capsys.readouterr().err


def test_refuses_a_gate_on_a_case_that_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--methods", "dense", "dpxa", "--recompute", "8", "--decode", "1,3:16", "--quantisation", "fp8")
    cases = ("dense", "dpxa", "dpxa recompute 8", "dense fp8", "dpxa fp8 recompute 8", "decode full")
    for case in (*cases, "decode 1,3:16"):
        given(monkeypatch, *asked, "--gate", f"{case}:exact>=0.9")
        _arguments()
    narrow = (*asked, "--kv-dtype", "int8")
    for case in (*cases, "dense K/V int8", "dpxa K/V int8 recompute 8", "decode 1,3:16 K/V int8"):
        given(monkeypatch, *narrow, "--gate", f"{case}:exact>=0.9")
        _arguments()
    given(monkeypatch, *narrow, "--decode", "quest:16")
    with pytest.raises(SystemExit, match="2"):
        _arguments()
    assert "--kv-dtype: quest reads K/V of --dtype alone" in capsys.readouterr().err
    given(monkeypatch, *asked, "--gate", "dpxa recompute 4:exact>=0.9")
    with pytest.raises(SystemExit, match="2"):
        _arguments()
    assert "--gate: no case 'dpxa recompute 4', but dense, dpxa, " in capsys.readouterr().err
    given(monkeypatch, "--gate", "dpxa:exact>=0.9")
    with pytest.raises(SystemExit, match="2"):
        served._arguments()
    assert "--gate: no case 'dpxa', but dense, dpxa_default, " in capsys.readouterr().err


def test_reads_method_options_from_the_command_line() -> None:
    assert split_method("dense") == ("dense", {})
    assert split_method("dpxa:tau=0.9,k_anchors=16") == ("dpxa", {"tau": 0.9, "k_anchors": 16.0})


def test_refuses_a_page_selection_before_prefilling_a_document(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(
        monkeypatch, "--model", str(model), "--no-adapter", "--device", "cpu", "--decode", "1,3:16", "99:16"
    )
    arguments = _arguments()
    with pytest.raises(ValueError, match="99"):
        _load(arguments)


def test_prefills_no_more_tokens_than_the_model_has_positions(model: Path) -> None:
    stack = whole_stack(model)
    positions = stack.config.positions
    with pytest.raises(ValueError, match=f"{positions + 1} tokens, but the model has {positions} positions"):
        Reader(stack, positions + 1).read([1] * (positions + 1), "dense", 128)


def test_refuses_an_unknown_kernel_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given(monkeypatch, "--only", "dense", "dens", "--out", str(tmp_path / "rows.json"))
    with pytest.raises(SystemExit, match="2"):
        kernels.main()
    assert "--only: no case of these modules is called dens\n" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cuda", "told"), [(False, "needs a CUDA device\n"), (True, "needs FlashInfer: ")])
def test_flashinfer_comparison_says_what_is_missing(
    cuda: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given(monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        beside_flashinfer.main()
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("some", [("--only", "dense"), ("--modules", "cases_decode")])
def test_partial_kernel_runs_must_name_another_output_file(
    some: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, *some)
    with pytest.raises(SystemExit, match="2"):
        kernels.main()
    assert "--out is needed" in capsys.readouterr().err


def test_check_reports_documents_with_outdated_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.md"
    old.write_text("<!-- table: sizing -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(tables, "DOCUMENTS", (old,))
    given(monkeypatch, "--check")
    assert tables.main() == 1
    assert capsys.readouterr().err == "not up to date: old.md\n"
    given(monkeypatch)
    assert tables.main() == 0
    given(monkeypatch, "--check")
    assert tables.main() == 0 and capsys.readouterr().err == ""
