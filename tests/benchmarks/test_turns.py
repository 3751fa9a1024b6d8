"""Timing two checkouts in turns: the protocol, with checkouts that only say how long they took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltafront.benchmarks import cases_decode, cases_executors, cases_selection, turns
from deltafront.benchmarks.harness import BenchConfig

TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
    empty_cache = staticmethod(lambda: None)

device = str
"""
"""In the processes, because importing the real one takes seconds."""
HARNESS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class BenchConfig:
    device: object
    tokens: int

def median_ms(run, *, budget_ms, at_least):
    assert budget_ms == 400 and at_least >= 1
    return run()
"""
MODULE = """
from pathlib import Path
from types import SimpleNamespace

LOG = Path(__file__).with_name("log")

def note(what):
    with LOG.open("a") as file:
        file.write(what + "\\n")

def check():
    note("check")

def prepare():
    note("prepare")
    print("something else that prints")
    times = iter({times})
    return SimpleNamespace(run=lambda: next(times))

def cases(config):
    made = SimpleNamespace(tokens=config.tokens, prepare=prepare, check=check)
    short = SimpleNamespace(tokens=config.tokens // 4, prepare=None, check=None, name="dense")
    return [SimpleNamespace(**vars(made), name=name) for name in ("dense", "delta_kv_50")] + [short]
"""


@pytest.fixture(autouse=True)
def light_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "light"))


def checkout(root: Path, times: list[float]) -> Path:
    folder = root / "benchmarks"
    folder.mkdir(parents=True)
    for package in (root, folder):
        (package / "__init__.py").write_text("")
    (folder / "harness.py").write_text(HARNESS)
    (folder / "cases_executors.py").write_text(MODULE.format(times=times))
    return root


def run(old: Path, new: Path, *more: str) -> int:
    return turns.main(["--old", str(old), "--new", str(new), "--only", "dense", "delta_kv_50", *more])


@pytest.mark.parametrize(("last", "status"), [(4.04, 0), (4.05, 1)])
def test_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str], last: float, status: int) -> None:
    """The first turn of each is not counted; the limit is on the median of the ratios."""
    old = checkout(tmp_path / "old", [1.0, 4.0, 4.0, 4.0])
    new = checkout(tmp_path / "new", [9.0, 8.0, 2.0, last])
    assert run(old, new, "--rounds", "3") == status
    out = capfd.readouterr().out
    assert f"old     4.0000 ms  new     {last:.4f} ms  ratio {last / 4:.4f} (0.5000 to 2.0000)" in out
    assert ("dense, delta_kv_50" if status else "none") in out.splitlines()[-1]
    for root in (old, new):
        log = (root / "benchmarks" / "log").read_text().split()
        assert log == ["check", "prepare", "prepare"], "a check that cases share runs once"


def test_what_fails_in_a_checkout_is_raised(tmp_path: Path) -> None:
    old, new = checkout(tmp_path / "old", [1.0] * 9), checkout(tmp_path / "new", [1.0])
    with pytest.raises(RuntimeError, match=r"(?s)in the new checkout.*StopIteration"):
        run(old, new)
    (new / "benchmarks" / "harness.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="process of the new checkout has ended: 3"):
        run(old, new)


def test_the_cases_exist() -> None:
    config = BenchConfig(device=torch.device("cpu"))
    modules = {
        "cases_executors": cases_executors,
        "cases_selection": cases_selection,
        "cases_decode": cases_decode,
    }
    for name, module in turns.CASES.items():
        assert [case.tokens for case in modules[module].cases(config) if case.name == name].count(
            config.tokens
        ) == 1
