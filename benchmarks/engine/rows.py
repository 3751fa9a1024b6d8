"""Rows of results, in one file that several runs on several machines fill. Pure, but for reading and writing.

A row is `case, tokens, gpus, density, value, unit`. gpus counts those of prefill; `parts` is where a time to
first token went; `decode_gpu` says whether decode had a GPU of its own; `commit` stands where a row is of
another one than the file. What follows from other rows (`derived`) is made anew whenever the file is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[str, int, int]
BATCH = 4
"""Requests that decode together, beside one alone."""


def row(
    case: str, value: float, unit: str, *, tokens: int = 0, gpus: int = 1, density: float | None = None
) -> Row:
    """tokens: 0 for what is not of one length."""
    rounded = round(density, 4) if density is not None else None
    return {"case": case, "tokens": tokens, "gpus": gpus, "density": rounded, "value": value, "unit": unit}


def key(one: Row) -> Key:
    return str(one["case"]), int(one["tokens"]), int(one["gpus"])


def merged(old: Mapping[str, Any] | None, rows: Iterable[Row], gpu: str, commit: str) -> dict[str, Any]:
    """The file's content: rows of the same case, tokens and gpus are replaced, others stay, with the commit
    they are of."""
    kept: dict[Key, Row] = {}
    if old is not None:
        for one in old["rows"]:
            of = one.get("commit", old["commit"])
            mark = {} if of == commit else {"commit": of}
            kept[key(one)] = {**{name: it for name, it in one.items() if name != "commit"}, **mark}
    kept.update({key(one): one for one in rows})
    kept.update({key(one): one for one in list(derived(kept))})
    return {"gpu": gpu, "commit": commit, "rows": [kept[place] for place in sorted(kept)]}


def merge_into(path: Path, rows: Iterable[Row], gpu: str, commit: str) -> dict[str, Any]:
    """Reads the file, if there is one, and writes it anew."""
    old = json.loads(path.read_text()) if path.exists() else None
    whole = merged(old, rows, gpu, commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def derived(rows: Mapping[Key, Row]) -> Iterator[Row]:
    """What follows from the measured rows: efficiency of a pipeline against one GPU, the
    hand-off's share of a time to first token, projections over their plain products, DELTA over full."""
    for (case, tokens, gpus), one in rows.items():
        at = {"tokens": tokens, "gpus": gpus, "density": one["density"]}
        alone = rows.get((case, tokens, 1))
        if case in ("ttft_dense", "ttft_dpxa") and gpus > 1 and alone is not None:
            share = alone["value"] / (gpus * one["value"])
            yield row(case.replace("ttft", "efficiency"), round(share, 4), "ratio", **at)
        if case == "ttft_dpxa":
            exposed = one["parts"].get("prefill.handoff", 0.0) + one["parts"].get("handoff_exposed", 0.0)
            yield row("handoff_share", round(exposed / one["value"], 4), "ratio", **at)
            products = rows.get(("linear_products", tokens, gpus))
            if products is not None:
                spent = one["parts"]["prefill.projection"]
                yield row("projection_ratio", round(spent / products["value"], 4), "ratio", **at)
        delta = rows.get((f"batch{BATCH}_token_delta", tokens, gpus))
        if case == f"batch{BATCH}_token_full" and delta is not None:
            gain = one["value"] / delta["value"]
            yield row(f"batch{BATCH}_full_over_delta", round(gain, 4), "ratio", **at)
