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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltafront.benchmarks.accuracy.paired import ratio_of_sums

Document = Mapping[str, Any]
"""One of a row's `by_document`."""
Pair = tuple[Document, Document]
Figure = tuple[str, float, tuple[float, float] | None]
"""Its name, the difference or ratio, and the interval; None of fewer than two documents."""


def pairs(mine: Sequence[Document], others: Sequence[Document]) -> list[Pair]:
    """Pair documents of the same name. Raises ValueError if there are none, or if one was not asked as many
    questions as its other half."""
    of = {one["document"]: one for one in others}
    found = [(one, of[one["document"]]) for one in mine if one["document"] in of]
    if not found:
        raise ValueError("the rows have no document in common")
    if any(a.get("questions") != b.get("questions") for a, b in found):
        raise ValueError("documents of the same name were asked other questions: they are not the same")
    return found


def differences(paired: Sequence[Pair]) -> Iterator[Figure]:
    """Compare each figure; one that the documents do not have is left out."""
    diverging, keyed = _with("kl", paired), _with("key_loss", paired)
    asked = _with("questions", paired)
    terms = {
        "KL, less": [(a["kl"] - b["kl"], 1.0) for a, b in diverging],
        "KL, over": [(a["kl"], b["kl"]) for a, b in diverging],
        "loss at key tokens, less": [
            ((a["key_loss"] - b["key_loss"]) * a["key_tokens"], a["key_tokens"]) for a, b in keyed
        ],
        "exact answers of dense's, less": [(a["exact"] - b["exact"], a["exact_dense"]) for a, b in asked],
        "logp, less": [
            ((a["logp_difference"] - b["logp_difference"]) * a["questions"], a["questions"]) for a, b in asked
        ],
    }
    for name, each in terms.items():
        if (found := ratio_of_sums(each)) is not None:
            yield name, *found


def _with(name: str, paired: Sequence[Pair]) -> list[Pair]:
    return [(a, b) for a, b in paired if name in a and name in b]


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
    if len(arguments.tokens) > 2:
        parser.error("--tokens: one number, or one for each row")
    mine = documents_of(arguments.row, arguments.task, arguments.tokens[0])
    other = documents_of(arguments.other, arguments.task, arguments.tokens[-1])
    try:
        paired = pairs(mine, other)
    except ValueError as error:
        raise SystemExit(f"{arguments.row} and {arguments.other}: {error}") from None
    print(f"{len(paired)} documents")
    for name, value, interval in differences(paired):
        drawn = f" ({interval[0]:.5f} to {interval[1]:.5f})" if interval else ""
        print(f"{name}: {value:.5f}{drawn}")


if __name__ == "__main__":
    main()
