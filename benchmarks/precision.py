"""Which number format keeps the answers: one model in one process, needles at full length.

    python -m deltafront.benchmarks.precision --text FILE [FILE …] --tokens 131072 --needles 100 \
        --dtypes bfloat16 float16 float32 --methods dense dpxa

The document is read in chunks by the same layers and kernels as a prefill worker's, then each question is
answered greedily with full attention by torch. No service, so that only the arithmetic differs. Prints exact
answers and writes the JSON of --result.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.arguments import told
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.long_context import make_document
from deltafront.benchmarks.reader import MODEL, ROOT, Reader, known_method, load_tokenizer
from deltafront.workers.model.decoder.load import load_model

DTYPES = ("bfloat16", "float16", "float32")
LONGEST_ANSWER = 48


def answer(reader: Reader, tokenizer: Tokenizer, question: str) -> str:
    """The greedy answer up to a full stop; the reader then forgets the question."""
    before, given = reader.length, list[int]()
    token = reader.next_token(tokenizer.encode(question).ids)
    while len(given) < LONGEST_ANSWER and "." not in tokenizer.decode([token]):
        given.append(token)
        token = reader.next_token([token])
    reader.length = before
    text: str = tokenizer.decode(given)
    return text


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[DEMO_TEXT])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--needles", type=int, default=40)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--seed", type=int, nargs="+", default=[3])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--methods", type=told(known_method), nargs="+", default=["dense"])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--hardware", default="", help="what it ran on, for the record")
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(MODEL.path)
    documents = [
        (text.stem, seed, *make_document(text, arguments, seed, tokenizer))
        for text, seed in itertools.product(arguments.text, arguments.seed)
    ]
    rows = []
    for dtype in arguments.dtypes:
        stack = load_model(replace(MODEL, dtype=dtype), arguments.device)
        reader = Reader(stack, arguments.tokens)
        for (text, seed, document, asked), method in itertools.product(documents, arguments.methods):
            reader.read(tokenizer.encode(document).ids, method, arguments.chunk)
            answers = {needle: answer(reader, tokenizer, needle.question) for needle in asked}
            wrong = {n.value: said.strip() for n, said in answers.items() if not n.answered_by(said)}
            exact = len(asked) - len(wrong)
            row = {"dtype": dtype, "text": text, "seed": seed, "method": method, "tokens": reader.length}
            rows.append({**row, "asked": len(asked), "exact": exact, "wrong": wrong})
            print(rows[-1], flush=True)
    if arguments.result:
        commit = arguments.commit or commit_of(ROOT)
        result = {"hardware": arguments.hardware, "commit": commit, "rows": rows}
        write_json(arguments.result, result)


if __name__ == "__main__":
    main()
