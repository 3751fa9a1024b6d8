"""Counts exact answers of the service, asked through gRPC. Every case gets the same documents and is compared
with the first case, such as dense prefill with full decode.

    python -m deltafront.benchmarks.accuracy.served [--config deploy/config/demo.yaml] [--documents 3]

The script starts the service of --config. Documents of each of --tasks are cut from the texts, which take
turns. Every prefill method prefills a document once into a session. Questions extend the session and are
answered greedily, several at once. A case NAME=METHOD[@full|delta] is a prefill method with its options and a
page selection for decode. The configuration sets how many blocks are recomputed for a question. An answer is
exact if its tokens are those of a right answer. --minutes M: Begin no document after M minutes. --outcomes
FILE: Append each document's answers to a file, and skip documents in the file.

The script prints a line for each case and document and a table. It writes --result as JSON: questions lost
and won, the exact sign test, the interval over documents, and the number of answers that equal the first
case's token by token. It exits with 1 if a --gate, such as `all_defaults:exact>=0.985`, is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.accuracy.paired import bootstrap_ratio, changes, sign_test
from deltafront.benchmarks.accuracy.report import Row, missed, parse_gate
from deltafront.benchmarks.accuracy.tables import served
from deltafront.benchmarks.accuracy.tasks import TASKS, parse_task
from deltafront.benchmarks.arguments import parser_of, told
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.reader import load_text, load_tokenizer
from deltafront.benchmarks.streams import ending
from deltafront.benchmarks.tables import RESULTS, ROOT
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.client.prompts import PromptLike
from deltafront.service.config import load
from deltafront.service.local.server_process import LocalService
from deltafront.service.request.answers import GenerateFinished, PrefillFinished
from deltafront.workers.calibration.probes import Document
from deltafront.workers.evaluation.setting import split_method
from deltafront.workers.messages.events import Token

CASES = (
    "dense=dense",
    "dpxa_default=dpxa",
    "dpxa_density=dpxa:density=0.08",
    "delta_default=dense@delta",
    "all_defaults=dpxa@delta",
)


@dataclass(frozen=True)
class Case:
    """A prefill method with options (`reader.parse_method`) and a page selection, `full` or `delta`."""

    name: str
    method: str
    selection: str


@dataclass(frozen=True)
class Answers:
    """The answers of one case on one document.

    Attributes:
        golds: The right answers to each prompt, in the order of the questions.
        tokens: The tokens of the answers.
        density: Share of causal tiles computed in prefill.
        page_share: Share of pages read in layers that select pages.
        recomputed: Mean number of tokens recomputed for a question.
        ttft_s: TTFT of the document's prefill.
    """

    case: Case
    document: str
    prompt_tokens: int
    golds: Sequence[Sequence[tuple[int, ...]]]
    tokens: Sequence[tuple[int, ...]]
    density: float
    page_share: float
    recomputed: float
    ttft_s: float

    @property
    def exact(self) -> list[bool]:
        return [
            any(given[: len(gold)] == gold for gold in golds)
            for given, golds in zip(self.tokens, self.golds, strict=True)
        ]


def parse_case(given: str) -> Case:
    """Parse `NAME=METHOD` or `NAME=METHOD@delta`. Raises ValueError."""
    name, _, rest = given.partition("=")
    method, _, selection = rest.partition("@")
    if not name or not method or selection not in ("", "full", "delta"):
        raise ValueError(f"no case {given!r}: NAME=METHOD or NAME=METHOD@full or NAME=METHOD@delta")
    return Case(name, method, selection or "full")


def read(client: DeltafrontClient, document: PromptLike, method: str) -> PrefillFinished:
    name, options = split_method(method)
    events = client.prefill(document, method=name, options=options, session_ttl_s=1800, skip_cache=True)
    return ending(events, PrefillFinished)


def answers(
    client: DeltafrontClient, name: str, document: Document, cases: Sequence[Case], at_once: int
) -> list[Answers]:
    """Ask the service a document's questions in each case. Each method prefills the document once."""
    golds: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for question in document.questions:
        golds.setdefault(question.prompt, []).append(question.gold)
    found = []
    for method, of_method in groupby(sorted(cases, key=lambda case: case.method), lambda case: case.method):
        reading = read(client, document.ids, method)
        session = reading.session.session_id
        for case in of_method:

            def asked(prompt: Sequence[int], case: Case = case, session: str = session) -> _Answer:
                longest = max(map(len, golds[tuple(prompt)]))
                return _ask(client, session, prompt, longest, case.selection)

            with ThreadPoolExecutor(at_once) as pool:
                given = list(pool.map(asked, golds))
            tokens, shares, recomputed = zip(*given, strict=True)
            ttft = reading.timings.ttft_seconds
            found.append(
                Answers(
                    case, name, reading.usage.prompt_tokens, [*golds.values()], tokens, reading.density.mean,
                    statistics.mean(shares), statistics.mean(recomputed), ttft,
                )
            )  # fmt: skip
            print(f"{name} {case.name}: {sum(found[-1].exact)} of {len(golds)}, {ttft:.1f} s", flush=True)
        client.release(session)
    return found


_Answer = tuple[tuple[int, ...], float, int]


def _ask(
    client: DeltafrontClient, session: str, prompt: Sequence[int], count: int, selection: str
) -> _Answer:
    """Ask one question. Return `count` tokens, the share of pages read and the count of recomputed tokens."""
    tokens: list[int] = []
    for event in client.generate(
        session_id=session,
        append=prompt,
        max_tokens=count,
        ignore_eos=True,
        page_selection=selection,
    ):
        if isinstance(event, Token):
            tokens.append(event.token_id)
        elif isinstance(event, GenerateFinished):
            return tuple(tokens), event.page_share, event.recomputed_tokens
    raise RuntimeError("Generate ended without a finish event")


def rows(found: Sequence[Answers], cases: Sequence[Case], task: str) -> list[Row]:
    """Make a row for each case over its documents, compared with the first case."""
    of = {case: [one for one in found if one.case == case] for case in cases}
    return [{"task": task, **_row(case, of[case], of[cases[0]])} for case in cases]


def _row(case: Case, mine: Sequence[Answers], base: Sequence[Answers]) -> Row:
    pairs = list(zip(mine, base, strict=True))
    exacts = [exact for one in mine for exact in one.exact]
    base_exacts = [exact for one in base for exact in one.exact]
    names = [f"{one.document} question {i}" for one in mine for i in range(len(one.golds))]
    changed = changes(base_exacts, exacts)
    interval = bootstrap_ratio([(sum(one.exact), sum(other.exact)) for one, other in pairs])
    return {
        "case": case.name,
        "method": case.method,
        "decode": case.selection,
        "tokens": max(one.prompt_tokens for one in mine),
        "documents": len(mine),
        "density": round(statistics.mean(one.density for one in mine), 4),
        "page_share": round(statistics.mean(one.page_share for one in mine), 4),
        "recomputed_tokens": round(statistics.mean(one.recomputed for one in mine), 1),
        "ttft_s": round(statistics.median(one.ttft_s for one in mine), 2),
        "questions": len(exacts),
        "exact": sum(exacts),
        "exact_dense": sum(base_exacts),
        "lost": [names[i] for i in changed.lost],
        "won": [names[i] for i in changed.won],
        "p": round(sign_test(len(changed.lost), len(changed.won)), 4),
        "ratio_95": interval and [round(bound, 4) for bound in interval],
        "same": sum(a == b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True)),
    }


Wanted = tuple[str, int, int, int, int]
"""The key of a document: task, index, number of questions, length in tokens, and seed."""


def append_answers(path: Path, wanted: Wanted, found: Sequence[Answers]) -> None:
    """Append one line to the file: a document's answers in all cases."""
    line = json.dumps({"document": wanted, "answers": [asdict(one) for one in found]})
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def read_answers(path: Path) -> dict[Wanted, list[Answers]]:
    """Read the answers that `append_answers` wrote, by document."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {tuple(one["document"]): [_answers(given) for given in one["answers"]] for one in lines}


def _answers(given: Mapping[str, Any]) -> Answers:
    golds = [[tuple(gold) for gold in right] for right in given["golds"]]
    tokens = [tuple(answer) for answer in given["tokens"]]
    return Answers(**{**given, "case": Case(**given["case"]), "golds": golds, "tokens": tokens})


def _asked(arguments: argparse.Namespace, left: Sequence[Wanted]) -> Iterator[tuple[Wanted, list[Answers]]]:
    """Ask the service about each document in `left`, until --minutes are over. Yield each document's
    answers."""
    started = time.monotonic()
    tokenizer = load_tokenizer(load(arguments.config).model.path)
    texts = {path.stem: load_text(path, tokenizer) for path in arguments.text}
    with LocalService(arguments.config) as service, DeltafrontClient(service.address) as client:
        for wanted in left:
            task, index, questions, tokens, seed = wanted
            if arguments.minutes is not None and time.monotonic() - started > 60 * arguments.minutes:
                print(f"{arguments.minutes:g} minutes are over: the documents left are not read", flush=True)
                return
            text = list(texts)[index % len(texts)]
            rng = random.Random(f"{seed} {task} {tokens} {index}")
            document = TASKS[task](rng, tokens, questions, texts[text])
            yield wanted, answers(client, f"{text}-{index}", document, arguments.cases, arguments.at_once)


def main() -> int:
    arguments = _arguments()
    known = {}
    if arguments.outcomes and arguments.outcomes.exists():
        known = read_answers(arguments.outcomes)
    if any({one.case for one in found} != set(arguments.cases) for found in known.values()):
        raise SystemExit(f"{arguments.outcomes} has other cases: give another file")
    of = itertools.product(range(arguments.documents), arguments.tasks)
    documents: list[Wanted] = [
        (task, index, questions, arguments.tokens, arguments.seed) for index, (task, questions) in of
    ]
    left = [one for one in documents if one not in known]
    for wanted, new in _asked(arguments, left) if left else ():
        known[wanted] = new
        if arguments.outcomes:
            append_answers(arguments.outcomes, wanted, new)
    found: dict[str, list[Answers]] = {task: [] for task, _ in arguments.tasks}
    for wanted in documents:
        found[wanted[0]] += known.get(wanted, [])
    result = {
        "hardware": arguments.hardware or f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "commit": arguments.commit or commit_of(ROOT),
        "note": arguments.note,
        "rows": [row for task in found if found[task] for row in rows(found[task], arguments.cases, task)],
    }
    write_json(arguments.result, result)
    print(served(result))
    reasons = missed(arguments.gate, result["rows"])
    for reason in reasons:
        print(f"gate missed: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--config", type=Path, default=ROOT / "deploy" / "config" / "demo.yaml")
    add("--text", type=Path, nargs="+", default=[DEMO_TEXT])
    add("--tokens", type=int, default=8192, help="of a document")
    add("--documents", type=int, default=3)
    add("--tasks", type=told(_asking), nargs="+", default=[("needles", 16)], metavar="TASK:COUNT")
    add("--minutes", type=float, help="after which no document is begun")
    add("--outcomes", type=Path, help="JSON lines, one for each document of a task")
    add("--cases", type=told(parse_case), nargs="+", default=[*map(parse_case, CASES)], metavar="NAME=METHOD")
    add("--at-once", type=int, default=8, help="questions under way")
    add("--gate", type=told(parse_gate), nargs="+", default=[], metavar="NAME:exact>=NUMBER")
    add("--seed", type=int, default=3)
    add("--result", type=Path, default=RESULTS / "accuracy_served_cpu.json")
    add("--hardware", default="", help="what it ran on, for the record")
    add("--note", default="", help="for the record")
    add("--commit", help="recorded instead of git's answer, where there is no git")
    arguments = parser.parse_args()
    cases = [case.name for case in arguments.cases]
    for gate in arguments.gate:
        if gate.case not in cases:
            parser.error(f"--gate: no case {gate.case!r}, but {', '.join(cases)}")
    return arguments


def _asking(given: str) -> tuple[str, int]:
    task, count = parse_task(given)
    if task == "prose":
        raise ValueError("prose asks nothing")
    return task, count


if __name__ == "__main__":
    sys.exit(main())
