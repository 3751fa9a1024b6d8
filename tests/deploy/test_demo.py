"""`make demo`'s conversation, with a client in place of the service."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deltafront.service.client import GenerateFinished, Progress, Token
from deltafront.service.errors import DeltafrontError, Unavailable
from deltafront.service.request.answers import Density, Timings
from deltafront.workers.calibration import needles as hay
from deltafront.workers.messages.events import FinishReason, Session, Usage

ROOT = Path(__file__).resolve().parents[2]
FACT = hay.make_needles(40, seed=7)[4]


class Service(contextlib.nullcontext[None]):
    address = "127.0.0.1:1"

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log


class Client(contextlib.nullcontext["Client"]):
    """Gives the answers of a list, in order."""

    def __init__(self, answers: list[str | DeltafrontError]) -> None:
        super().__init__(self)
        self.answers = answers
        self.asked: list[dict[str, Any]] = []

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(
            display_name="M", model="m", prefill_stages=2, decode_workers=1, metrics_address="127.0.0.1:2"
        )

    def generate(self, **request: Any) -> Iterator[Progress | Token | GenerateFinished]:
        self.asked.append(request)
        answer = self.answers.pop(0)
        yield Progress(tokens_done=3072, tokens_total=7961)
        if isinstance(answer, DeltafrontError):
            raise answer
        yield Token(index=0, token_id=1, logprob=0.0, text=answer)
        yield finished()

    def release(self, session_id: str) -> None:
        assert session_id == "kept"


def finished() -> GenerateFinished:
    return GenerateFinished(
        reason=FinishReason.STOP,
        text="",
        usage=Usage(prompt_tokens=7961, completion_tokens=1, cached_tokens=0),
        timings=Timings(2.0, {"prefill": 2.0}, [], 3.0),
        density=Density("dpxa", 0.5),
        session=Session(session_id="kept", expires=0.0, tokens=7961),
        page_share=1.0,
        request_id="r",
    )


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "deploy" / "demo" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    handler = signal.getsignal(signal.SIGINT)
    spec.loader.exec_module(module)
    signal.signal(signal.SIGINT, handler)
    (tmp_path / "serve.log").touch()
    monkeypatch.setattr(module, "LocalService", lambda _config: Service(tmp_path / "serve.log"))
    monkeypatch.setattr(module, "ask_by_openai", lambda *_given: None)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setenv("COLUMNS", "200")
    return module


def run(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: list[str | DeltafrontError]) -> int:
    monkeypatch.setattr(demo, "DeltafrontClient", lambda _address: Client(answers))
    return int(demo.main())


def test_demo_asks_for_a_hidden_fact_and_about_its_book(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client([f" {FACT.value}", " New Bedford"])
    monkeypatch.setattr(demo, "DeltafrontClient", lambda _address: client)
    assert demo.main() == 0
    fact, book = client.asked
    assert "New Bedford" in fact["prompt"] and FACT.sentence in fact["prompt"]
    assert fact["append"] == FACT.question and "Spouter-Inn" in book["append"]
    assert book["session_id"] == "kept" and "prompt" not in book
    printed = capsys.readouterr().out
    assert "40 facts are hidden in the beginning of Moby Dick" in printed
    assert printed.count("Answer is correct") == 2


def test_demo_shows_what_it_expected_after_a_wrong_answer(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(demo, monkeypatch, [" 1", " Nantucket"]) == 0
    printed = capsys.readouterr().out
    assert "Answer is expected New Bedford" in printed and f"Answer is expected {FACT.value}" in printed


def test_demo_prints_an_error_in_one_line_and_the_path_of_its_log(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(demo, monkeypatch, [Unavailable("no prefill group is running")]) == 1
    printed = capsys.readouterr().out
    assert "\ndeltafront: no prefill group is running\n" in printed
    assert f"{tmp_path}/serve.log says more" in printed
