"""Tests the accuracy benchmark through gRPC with a fake client: its requests and its rows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deltafront.benchmarks.accuracy import served as module
from deltafront.benchmarks.accuracy.report import missed, parse_gate
from deltafront.benchmarks.accuracy.served import Answers, answers, append_answers, parse_case, rows
from deltafront.benchmarks.accuracy.tables import served
from deltafront.service.request.answers import Density, GenerateFinished, PrefillFinished, Timings
from deltafront.workers.calibration.probes import Document, Question
from deltafront.workers.messages.events import FinishReason, Session, Token, Usage

CASES = [parse_case(one) for one in ("dense=dense", "sparse=dpxa:tau=0.5", "pages=dpxa:tau=0.5@delta")]
QUESTIONS = [Question(f"q{i}", (i, 7), (i, i + 1)) for i in range(3)]
TIMINGS = Timings(2.0, {}, [], 2.0)


class FakeClient:
    """A client whose answers are right after dense prefill. After other methods question 1 is wrong, and with
    selected pages also question 2."""

    def __init__(self) -> None:
        self.read: list[tuple[str, dict[str, float]]] = []
        self.held = set[str]()

    def prefill(
        self,
        prompt: Sequence[int],
        *,
        method: str,
        options: dict[str, float],
        session_ttl_s: float,
        skip_cache: bool,
    ) -> Iterator[PrefillFinished]:
        assert skip_cache and not self.held, "whatever is remembered of it"
        self.read.append((method, options))
        self.held.add(method)
        density = Density(method, 1.0 if method == "dense" else 0.25)
        yield PrefillFinished(
            Session(session_id=method, expires=time.time() + session_ttl_s, tokens=len(prompt)),
            Usage(prompt_tokens=len(prompt), completion_tokens=0),
            TIMINGS,
            density,
            "",
        )

    def generate(
        self,
        *,
        session_id: str,
        append: Sequence[int],
        max_tokens: int,
        page_selection: str,
        ignore_eos: bool,
    ) -> Iterator[Any]:
        assert session_id in self.held and ignore_eos
        number = append[0]
        wrong = session_id != "dense" and (number == 1 or (number == 2 and page_selection == "delta"))
        for index, token in enumerate([number, number + 1 + wrong][:max_tokens]):
            yield Token(index=index, token_id=token, logprob=-0.1)
        share = 0.5 if page_selection == "delta" else 1.0
        usage = Usage(prompt_tokens=len(append), completion_tokens=max_tokens)
        yield GenerateFinished(
            FinishReason.LENGTH,
            "",
            usage,
            TIMINGS,
            Density(),
            None,
            share,
            "",
            recomputed_tokens=128 * number,
        )

    def release(self, session_id: str) -> None:
        self.held.remove(session_id)


def test_prefills_once_per_method_and_compares_with_the_first_case() -> None:
    client, found = FakeClient(), list[Answers]()
    for name in ("a", "b"):
        found += answers(client, name, Document([1] * 40, QUESTIONS), CASES, 2)  # type: ignore[arg-type]
    assert client.read == [("dense", {}), ("dpxa", {"tau": 0.5})] * 2 and not client.held
    dense, sparse, pages = rows(found, CASES, "needles")
    assert (dense["exact"], dense["same"], dense["lost"], dense["p"]) == (6, 6, [], 1.0)
    assert (sparse["exact"], sparse["exact_dense"], sparse["questions"]) == (4, 6, 6)
    assert sparse["lost"] == ["a question 1", "b question 1"] and sparse["won"] == []
    assert (sparse["p"], sparse["same"], sparse["density"]) == (0.5, 4, 0.25)
    assert (pages["exact"], pages["page_share"], pages["p"]) == (2, 0.5, 0.125)
    assert pages["ratio_95"] == [0.3333, 0.3333] and pages["recomputed_tokens"] == 128
    gates = [parse_gate("sparse:exact>=0.6,density<=0.3"), parse_gate("pages:exact>=0.9")]
    assert missed(gates, [dense, sparse, pages]) == ["pages, needles, 40 tokens: exact is 0.3333, not >= 0.9"]
    table = served({"hardware": "here", "rows": [dense, sparse, pages]})
    row = (
        "| needles | pages | `dpxa:tau=0.5` | delta | 40 | 0.250 | 0.500 | 128 | 2.0 | 2 of 6"
        " | 0.333 (0.333 to 0.333) | 4, 0; 0.12 | 2 |"
    )
    assert row in table


def test_skips_documents_in_the_outcomes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, result = tmp_path / "answers.jsonl", tmp_path / "result.json"
    found = [answers(FakeClient(), f"{n}", Document([1] * 40, QUESTIONS), CASES, 2) for n in range(2)]  # type: ignore[arg-type]
    for index, of_document in enumerate(found):
        append_answers(outcomes, ("needles", index, 3, 8192, 3), of_document)
    monkeypatch.setattr(module, "LocalService", None)
    files = ["--outcomes", str(outcomes), "--result", str(result)]
    given = ["--tasks", "needles:3", "--documents", "2", "--commit", "c", *files, "--cases"]
    named = ["dense=dense", "sparse=dpxa:tau=0.5", "pages=dpxa:tau=0.5@delta"]
    monkeypatch.setattr(sys, "argv", ["served", *given, *named])
    assert module.main() == 0
    assert json.loads(result.read_text())["rows"] == rows([*found[0], *found[1]], CASES, "needles")
    monkeypatch.setattr(sys, "argv", ["served", *given, *named[:2]])
    with pytest.raises(SystemExit, match="has other cases: give another file"):
        module.main()


def test_gives_no_score_if_the_baseline_answers_nothing() -> None:
    client = FakeClient()
    wrong = [Question("q", (5, 7), (9, 9))]
    found = answers(client, "a", Document([1] * 40, wrong), CASES, 1)  # type: ignore[arg-type]
    table = served({"hardware": "here", "rows": rows(found, CASES, "needles")})
    assert table.count("| 0 of 1 | – | 0, 0; 1 |") == 3


def test_asks_each_prompt_once_and_accepts_any_right_answer() -> None:
    """A question may have several right answers. The longest one sets the number of tokens."""
    client = FakeClient()
    questions = [Question("both 1", (5, 7), gold) for gold in ((9, 9), (5,), (5, 6))]
    questions += [Question("both 2", (6, 7), (6, 1)), Question("both 2", (6, 7), (7, 7))]
    (found,) = answers(client, "a", Document([1] * 40, questions), CASES[:1], 2)  # type: ignore[arg-type]
    assert found.tokens == ((5, 6), (6, 7)) and found.exact == [True, False]
    (row,) = rows([found], CASES[:1], "copies")
    assert (row["questions"], row["exact"]) == (2, 1)


@pytest.mark.parametrize("given", ["dpxa", "a=", "=dpxa", "a=dpxa@some", "a=@full"])
def test_refuses_malformed_cases(given: str) -> None:
    with pytest.raises(ValueError, match="no case"):
        parse_case(given)
