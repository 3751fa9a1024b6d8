"""How two rows of results differ on the documents that both have, with intervals over these documents.

    python -m deltafront.benchmarks.accuracy.difference RESULT.json:ROW RESULT.json:ROW [--task TASK] \
        [--tokens TOKENS [TOKENS]]

ROW is a row's case, as its table shows it. Prints what the first has less the second has, and 95% of what
documents drawn with replacement give: of the KL (and the first's over the second's), of the loss at key
tokens, of exact answers as a share of the first's baseline, and of the log-probability of answers. Documents
are paired by name, so both rows are to be of the same texts, places and questions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltafront.benchmarks.accuracy.paired import bootstrap_ratio

Document = Mapping[str, Any]
"""One of a row's `by_document`."""
Figure = tuple[str, float, tuple[float, float] | None]
"""Its name, the difference or ratio, and the interval; None of fewer than two documents."""


def differences(mine: Sequence[Document], others: Sequence[Document]) -> Iterator[Figure]:
    """Compare documents of the same name; a figure that they do not have is left out. Raises ValueError for
    documents that were not asked as many questions."""
    of = {one["document"]: one for one in others}
    pairs = [(one, of[one["document"]]) for one in mine if one["document"] in of]
    diverging = _with("kl", pairs)
    yield from _figure("KL, less", [(a["kl"] - b["kl"], 1.0) for a, b in diverging])
    yield from _figure("KL, over", [(a["kl"], b["kl"]) for a, b in diverging])
    key = [(a["key_loss"] - b["key_loss"], a["key_tokens"]) for a, b in _with("key_loss", pairs)]
    yield from _figure("loss at key tokens, less", [(loss * many, many) for loss, many in key])
    asked = _with("questions", pairs)
    if any(a["questions"] != b["questions"] for a, b in asked):
        raise ValueError("documents of the same name were asked other questions: they are not the same")
    yield from _figure(
        "exact answers of dense's, less", [(a["exact"] - b["exact"], a["exact_dense"]) for a, b in asked]
    )
    logp = [(a["logp_difference"] - b["logp_difference"], a["questions"]) for a, b in asked]
    yield from _figure("logp, less", [(apart * many, many) for apart, many in logp])


def _with(name: str, pairs: Sequence[tuple[Document, Document]]) -> list[tuple[Document, Document]]:
    return [(a, b) for a, b in pairs if name in a and name in b]


def _figure(name: str, terms: Sequence[tuple[float, float]]) -> Iterator[Figure]:
    whole = math.fsum(below for _, below in terms)
    if whole:
        yield name, math.fsum(above for above, _ in terms) / whole, bootstrap_ratio(terms)


def documents_of(given: str, task: str | None, tokens: int | None) -> list[Document]:
    """given: FILE:CASE, and a case may have colons. Raises SystemExit for a row that is not there, or whose
    documents its file does not tell apart."""
    name, _, case = given.partition(":")
    rows = [row for row in json.loads(Path(name).read_text())["rows"] if row["case"] == case]
    rows = [row for row in rows if task in (None, row.get("task")) and tokens in (None, row["tokens"])]
    if len(rows) != 1:
        raise SystemExit(f"{given}: {len(rows)} rows, not one; --task, --tokens or the whole case name it")
    documents: list[Document] = rows[0].get("by_document", [])
    if not documents:
        raise SystemExit(f"{given}: the row has no figures by document")
    return documents


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", metavar="RESULT.json:ROW")
    parser.add_argument("other", metavar="RESULT.json:ROW")
    parser.add_argument("--task", help="of both rows, where a case stands once for each")
    parser.add_argument("--tokens", type=int, nargs="+", default=[None], help="of both rows, or of each")
    arguments = parser.parse_args(given)
    mine = documents_of(arguments.row, arguments.task, arguments.tokens[0])
    other = documents_of(arguments.other, arguments.task, arguments.tokens[-1])
    shared = {one["document"] for one in mine} & {one["document"] for one in other}
    print(f"{len(shared)} documents")
    for name, value, interval in differences(mine, other):
        drawn = f" ({interval[0]:.5f} to {interval[1]:.5f})" if interval else ""
        print(f"{name}: {value:.5f}{drawn}")


if __name__ == "__main__":
    main()
