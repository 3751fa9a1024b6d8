"""Result rows, which runs on several machines merge into one file.

A row has `case`, `tokens`, `gpus` (of prefill), `density`, `value` and `unit`, and where they apply: `parts`,
the parts of TTFT; `decode_gpu`, the GPU that decoded, or `alone` if no service ran; `ranks`, the decode
worker's ranks, if several; `kv_dtype`, if not 16 bits; `chunk`, the longest chunk (8,192 tokens on one GPU in
older rows without it); `commit`, if not the file's. Rows of `derived` are recomputed whenever the file is
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deltafront.benchmarks.harness import write_json

Row = dict[str, Any]
Key = tuple[str, int, int, int, str]
BATCH = 4
"""Batch size of decode measurements with several requests."""
_GROUPS = "_groups_"


def row(
    case: str, value: float, unit: str, *, tokens: int = 0, gpus: int = 1, density: float | None = None
) -> Row:
    """Make a row. tokens: 0 if the case has no single prompt length."""
    rounded = round(density, 4) if density is not None else None
    return {"case": case, "tokens": tokens, "gpus": gpus, "density": rounded, "value": value, "unit": unit}


def throughput_row(method: str, rate: float, tokens: int, gpus: int, groups: int) -> Row:
    """Make a row of prompts per second. `rate` and `gpus` are totals over all prefill groups."""
    name = f"prompts_per_s_{method}"
    return row(name if groups == 1 else f"{name}{_GROUPS}{groups}", rate, "1/s", tokens=tokens, gpus=gpus)


def key(one: Row) -> Key:
    """Return the key of a row. Rows that repeat a measurement have the same key."""
    held = [one["decode_gpu"]] if one.get("decode_gpu") == "mapped" else []
    held += [one[name] for name in ("kv_dtype", "shape") if name in one]
    return str(one["case"]), int(one["tokens"]), int(one["gpus"]), int(one.get("ranks", 1)), " ".join(held)


def merged(old: Mapping[str, Any] | None, rows: Iterable[Row], gpu: str, commit: str) -> dict[str, Any]:
    """Return the file's new content. Rows replace old rows of the same key; others keep their commit."""
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
    """Merge rows into the file and write it. The file need not exist."""
    old = json.loads(path.read_text()) if path.exists() else None
    whole = merged(old, rows, gpu, commit)
    write_json(path, whole)
    return whole


def derived(rows: Mapping[Key, Row]) -> Iterator[Row]:
    """Derive ratios from measured rows: a pipeline's efficiency compared with one GPU, the KV hand-off's
    share of TTFT, projections over plain GEMMs, full decode over DELTA decode, several prefill groups over
    one, and decode with an 8-bit KV cache over 16 bits. Only rows of one commit are compared.
    """
    for (case, tokens, gpus, ranks, held), one in rows.items():
        like: Row = {name: one[name] for name in ("ranks", "kv_dtype", "shape") if name in one}
        where = one.get("decode_gpu")
        like |= {"decode_gpu": where} if where in ("mapped", "alone") else {}
        kv_dtype = str(one.get("kv_dtype", ""))
        mark = {"commit": one["commit"]} if "commit" in one else {}

        def ratio(name: str, value: float, one: Row = one, mark: Row = mark, like: Row = like) -> Row:
            at = {"tokens": one["tokens"], "gpus": one["gpus"], "density": one["density"]}
            return {**row(name, round(value, 4), "ratio", **at), **like, **mark}

        def beside(place: Key, one: Row = one) -> Row | None:
            other = rows.get(place)
            return other if other is not None and other.get("commit") == one.get("commit") else None

        alone = beside((case, tokens, 1, 1, kv_dtype))
        products = beside(("linear_products", tokens, gpus, 1, ""))
        if case in ("ttft_dense", "ttft_dpxa") and gpus > 1 and alone is not None:
            yield ratio(case.replace("ttft", "efficiency"), alone["value"] / (gpus * one["value"]))
        if case == "ttft_dpxa":
            parts = one["parts"]
            exposed = parts.get("prefill.handoff", 0.0) + parts.get("handoff_exposed", 0.0)
            yield ratio("handoff_share", exposed / one["value"])
            if products is not None:
                yield ratio("projection_ratio", parts["prefill.projection"] / products["value"])
        name, _, groups = case.partition(_GROUPS)
        if groups and (group := beside((name, tokens, gpus // int(groups), ranks, held))) is not None:
            yield ratio(
                name.replace("prompts_per_s", f"groups_{groups}_over_1"), one["value"] / group["value"]
            )
        in_16_bits = " ".join(part for part in held.split() if part != kv_dtype)
        wide = beside((case, tokens, gpus, ranks, in_16_bits))
        step = case.removesuffix("_fp8").endswith(("token_full", "token_delta"))  # also with FP8 weights
        if kv_dtype and step and wide is not None:
            yield ratio(f"{case}_kv_over_16_bits", one["value"] / wide["value"])
        delta = beside((f"batch{BATCH}_token_delta", tokens, gpus, ranks, held))
        if case == f"batch{BATCH}_token_full" and delta is not None:
            yield ratio(f"batch{BATCH}_full_over_delta", one["value"] / delta["value"])
