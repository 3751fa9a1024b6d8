"""Accuracy and TTFT at full length through gRPC: needles in real text, one session for each method.

    python -m deltafront.benchmarks.long_context --config deploy/config/gpu.yaml --text FILE [FILE …] \
        --tokens 131072 --needles 100 --questions 10 --methods dense dpxa xattention streaming+delta

Each text gives one document for each seed, which is read with every method; then the questions are asked on
its session. A method may carry options: `dpxa:tau=0.9,k_anchors=16`. Reports exact answers with full and with
DELTA decode, the median TTFT of `--repeats` reads, its parts, and the density. A text must be about 10%
longer than wanted (a whole novel for 131,072 tokens). Prints a line for each reading and writes the JSON
named by --result.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.reader import load_tokenizer, parse_method, split_method
from deltafront.benchmarks.streams import ending
from deltafront.service.client.client import DeltafrontClient, PromptLike
from deltafront.service.config import load
from deltafront.service.local.server_process import LocalService
from deltafront.service.request.answers import GenerateFinished, PrefillFinished
from deltafront.workers.calibration import needles as hay

ROOT = Path(__file__).resolve().parent.parent


def read(client: DeltafrontClient, document: PromptLike, method: str) -> PrefillFinished:
    name, options = split_method(method)
    events = client.prefill(document, method=name, options=options, session_ttl_s=1800, skip_cache=True)
    return ending(events, PrefillFinished)


def ask(
    client: DeltafrontClient, session: str, question: str, selection: str
) -> tuple[str, GenerateFinished]:
    answer = ""
    events = client.generate(
        session_id=session, append=question, max_tokens=48, stop=["."], page_selection=selection
    )
    for event in events:
        if isinstance(event, GenerateFinished):
            return answer + event.text, event
        answer += getattr(event, "text", "")
    raise RuntimeError("Generate ended without a finish event")


def run_method(
    client: DeltafrontClient, document: str, method: str, asked: Sequence[hay.Needle], repeats: int
) -> dict[str, object]:
    """One row: `repeats` reads of the document, then the questions with full and with delta decode."""
    results: list[PrefillFinished] = []
    for _ in range(repeats):
        if results:  # the next would continue from it instead of reading
            client.release(results[-1].session.session_id)
        results.append(read(client, document, method))
    result = results[-1]
    session = result.session.session_id
    right = {"full": 0, "delta": 0}
    question_ttft, wrong, shares = [], [], []
    for needle in asked:
        for selection in right:
            answer, finish = ask(client, session, needle.question, selection)
            right[selection] += needle.answered_by(answer)
            if not needle.answered_by(answer):
                wrong.append({"decode": selection, "expected": needle.value, "answer": answer.strip()})
            question_ttft.append(finish.timings.ttft_seconds)
            if selection == "delta":
                shares.append(finish.page_share)
    client.release(session)
    return {
        "method": method,
        "tokens": result.usage.prompt_tokens,
        "page_share": round(statistics.mean(shares), 4),
        "exact_full_decode": right["full"],
        "exact_delta_decode": right["delta"],
        "asked": len(asked),
        "ttft_s": round(statistics.median(r.timings.ttft_seconds for r in results), 3),
        "question_ttft_s": round(statistics.median(question_ttft), 4),
        "density": round(result.density.mean, 4),
        "scoring_over_attention": round(result.density.scoring_overhead, 4),
        "wrong": wrong,
        "parts": {name: round(seconds, 4) for name, seconds in result.timings.parts.items()},
    }


def document_with(
    text: str, needles: list[hay.Needle], tokens: int, count_tokens: Callable[[str], int], seed: int
) -> str:
    """Return a document of at most `tokens` tokens with all needles. Raises ValueError for a short text."""
    if count_tokens(hay.hide(text, needles, seed)) < tokens:
        raise ValueError(f"the text is too short for {tokens} tokens")
    words = text.split(" ")
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(hay.hide(" ".join(words[:middle]), needles, seed)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return hay.hide(" ".join(words[:low]), needles, seed)


def make_document(
    text: Path, arguments: argparse.Namespace, seed: int, tokenizer: Tokenizer
) -> tuple[str, Sequence[hay.Needle]]:
    """A document and the needles to ask for. The question and its answer follow it within the positions."""
    needles = hay.make_needles(arguments.needles, seed)
    document = document_with(
        text.read_text(), needles, arguments.tokens - 128, lambda t: len(tokenizer.encode(t).ids), seed
    )
    return document, needles[: arguments.questions]  # hide() spreads them at random over the document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=[DEMO_TEXT])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--needles", type=int, default=100)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, nargs="+", default=[3], help="of the needles and their places")
    parser.add_argument("--methods", nargs="+", default=["dense", "dpxa", "xattention", "streaming+delta"])
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "results" / "long_context.json")
    parser.add_argument("--hardware", default="", help="what it ran on, for the record")
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(load(arguments.config).model.path)
    for method in arguments.methods:
        parse_method(method)  # a mistake is told before anything is read
    rows = []
    with LocalService(arguments.config) as service, DeltafrontClient(service.address) as client:
        for text, seed in itertools.product(arguments.text, arguments.seed):
            document, asked = make_document(text, arguments, seed, tokenizer)
            for method in arguments.methods:
                row = run_method(client, document, method, asked, arguments.repeats)
                rows.append({"text": text.stem, "seed": seed, **row})
                print({k: v for k, v in rows[-1].items() if k not in ("parts", "wrong")}, flush=True)
    commit = arguments.commit or commit_of(ROOT)
    result = {"hardware": arguments.hardware, "commit": commit, "rows": rows}
    write_json(arguments.result, result)


if __name__ == "__main__":
    main()
