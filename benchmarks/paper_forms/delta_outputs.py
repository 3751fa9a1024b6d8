"""Outputs and the order of keys under the Δ correction, and what its Lemma 1 bounds (Willette et al. 2025,
Figures 3, 9, 11).

    python -m deltafront.benchmarks.paper_forms.delta_outputs --text FILE [FILE …] --tokens 130900 --out FILE

Each text's document is read densely and with every method, in one piece. For 128 rows, by layer, over rows
and heads:

cosine: between a head's output and dense attention's.
ranks: Spearman's correlation of a query's logits over the keys before those rows with dense attention's. The
queries and keys are those of that reading, as in the paper.

Lemma 1 is looked at for the dense reading's rows, with the keys that `streaming` keeps and with as many best
ones: the mean of what the difference of outputs misses of the dropped keys' part, the mean of its bound, and
the largest share of the bound that is reached.

--before: the rows end so many tokens before the document does, once for each number. The correction's dense
end is at most 255 rows, which are dense whatever came before.
--out: gets a line of JSON for each document when it is read; documents that stand in it are not read again.
--shard I/N: only texts I, I + N, I + 2 N, …, as one of N processes. --tables FILE …: reads no document, and
prints the tables of what stands in these files. A figure is the mean over documents ± its standard error.

Shape suffixes as in `kernels.interface`; R rows, X kept keys.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from deltafront.benchmarks.accuracy.paired import mean_and_error
from deltafront.benchmarks.arguments import parse_shard, told
from deltafront.benchmarks.markdown import markdown
from deltafront.benchmarks.paper_forms.delta_xattention import listed
from deltafront.benchmarks.paper_forms.levels import METHODS, documents_of, model_of, parser_of
from deltafront.benchmarks.reader import known_method, parse_method
from deltafront.kernels.build import build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.methods import load, method_spec
from deltafront.kernels.options import StreamingOptions
from deltafront.kernels.selectors.streaming import StreamingSelector
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack

ROWS = 128
METHODS_SHOWN = ["streaming", "streaming+delta", "streaming+delta:spread=0"]
"""The paper's three: alone, corrected by equation 6, and by equation 5."""
Figures = dict[str, Any]
"""before; methods: of each, by layer, `cosine` and `ranks`; lemma: of each choice of keys, `error`, `bound`
and `most`. In a file also `document` and `tokens`."""


@dataclass(frozen=True)
class LastRows:
    """A layer's rows: outputs and queries; and all keys before them."""

    out_HRD: torch.Tensor
    q_HRD: torch.Tensor
    k_GSD: torch.Tensor


@dataclass
class Bound:
    """Sums of Lemma 1's error and bound over rows, heads, layers and columns of the values."""

    error: float = 0.0
    bound: float = 0.0
    count: int = 0
    most: float = 0.0

    def add(self, error_RD: torch.Tensor, bound_RD: torch.Tensor) -> None:
        self.error += float(error_RD.sum())
        self.bound += float(bound_RD.sum())
        self.count += error_RD.numel()
        self.most = max(self.most, float((error_RD / bound_RD.clamp(min=1e-12)).max()))


@torch.inference_mode()
def last_rows(
    stack: LayerStack,
    ids: Sequence[int],
    method: str,
    slices: Sequence[slice],
    bounds: Sequence[dict[str, Bound]] | None = None,
) -> list[list[LastRows]]:
    """By slice of rows and layer, of a reading with the method at any length. bounds: by slice, sums for
    Lemma 1's figures."""
    given, found = parse_method(method), [list[LastRows]() for _ in slices]
    options = {"min_tokens": 0} if "min_tokens" in given.values else {}
    attention = build(method_spec(given.name, {**given.values, **options}))

    def hook(layer: int, x: AttentionInput) -> torch.Tensor:
        out_BHTD = attended(attention, x, layer)
        k_GSD = x.k_BGSD[0].clone()
        for rows, layers in zip(slices, found, strict=True):
            kept = out_BHTD[0, :, rows].clone(), x.q_BHTD[0, :, rows].clone()
            layers.append(LastRows(*kept, k_GSD[:, : rows.start]))
        if bounds is not None:
            for rows, sums in zip(slices, bounds, strict=True):
                _add_bounds(x, rows, sums)
        return out_BHTD

    read_densely(stack, embedded(stack, ids), hook)
    return found


def cosine(mine: LastRows, dense: LastRows) -> float:
    pair = mine.out_HRD.float(), dense.out_HRD.float()
    return float(torch.nn.functional.cosine_similarity(*pair, dim=2).mean())


def rank_correlations(each: Sequence[LastRows], dense: LastRows) -> list[float]:
    """Correlate the ranks of each with dense attention's. A number is the mean over heads and rows."""
    heads, keys = dense.q_HRD.shape[0], dense.k_GSD.shape[1]
    total_M = [0.0] * len(each)
    for h in range(heads):
        dense_RS = _ranks(dense, h)
        for m, mine in enumerate(each):
            apart_R = (_ranks(mine, h) - dense_RS).square().sum(1)
            total_M[m] += float((1 - 6 * apart_R / (keys * (keys**2 - 1))).mean())
    return [total / heads for total in total_M]


def _ranks(one: LastRows, h: int) -> torch.Tensor:
    """Rank the keys by a head's logits: rank_RS, float64. Equal logits keep the order of their keys."""
    group = one.q_HRD.shape[0] // one.k_GSD.shape[0]
    order_RS = (one.q_HRD[h].float() @ one.k_GSD[h // group].float().T).argsort(dim=1, stable=True)
    place_S = torch.arange(order_RS.shape[1], device=order_RS.device).expand_as(order_RS)
    return torch.empty_like(order_RS).scatter_(1, order_RS, place_S).double()


def lemma_1(
    logit_RS: torch.Tensor, v_SD: torch.Tensor, kept_RS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """error_RD and bound_RD, float64. error: |Δ - the dropped keys' part of dense attention|, Δ being dense
    less sparse output. logit_RS: -inf for keys that a row does not see; it keeps none of those."""
    weight_RS, v = logit_RS.double().softmax(1), v_SD.double()
    head_R1 = weight_RS.masked_fill(kept_RS, 0.0).sum(1, keepdim=True)
    kept_weight_RS = weight_RS * kept_RS
    sparse_RD = kept_weight_RS @ v / kept_weight_RS.sum(1, keepdim=True)
    difference_RD = weight_RS @ v - sparse_RD
    error_RD = (difference_RD - weight_RS.masked_fill(kept_RS, 0.0) @ v).abs()
    count_R = kept_RS.sum(1)
    key_RX = kept_RS.byte().topk(int(count_R.max()), dim=1).indices
    beyond_RX = torch.arange(key_RX.shape[1], device=key_RX.device) >= count_R[:, None]
    largest_RD = v.abs()[key_RX].masked_fill(beyond_RX[..., None], 0.0).amax(1)
    return error_RD, head_R1 * largest_RD


def _add_bounds(x: AttentionInput, rows: slice, sums: dict[str, Bound]) -> None:
    streamed_NM = listed(x, StreamingSelector(StreamingOptions()).select(x, None, no_phase))[0, 0]
    row_R = torch.arange(rows.start, rows.stop, device=x.q_BHTD.device)
    key_S = torch.arange(rows.stop, device=row_R.device)
    seen_RS = key_S <= row_R[:, None]
    kept_RS = streamed_NM[row_R // BLOCK].repeat_interleave(BLOCK, dim=1)[:, : rows.stop] & seen_RS
    for h in range(x.q_BHTD.shape[1]):
        k_SD, v_SD = (kv[0, h // x.group, : rows.stop] for kv in (x.k_BGSD, x.v_BGSD))
        logit_RS = x.q_BHTD[0, h, rows].float() @ k_SD.float().T * x.scale
        logit_RS.masked_fill_(~seen_RS, -torch.inf)
        sums["streaming"].add(*lemma_1(logit_RS, v_SD, kept_RS))
        sums["best keys"].add(*lemma_1(logit_RS, v_SD, best(logit_RS, kept_RS.sum(1))))


def best(logit_RS: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """kept_RS: the `count` keys of the largest logits of each row."""
    order_RX = logit_RS.topk(int(count_R.max()), dim=1).indices
    within_RX = torch.arange(order_RX.shape[1], device=order_RX.device) < count_R[:, None]
    return torch.zeros_like(logit_RS, dtype=torch.bool).scatter_(1, order_RX, within_RX)


def figures(
    stack: LayerStack, ids: Sequence[int], methods: Sequence[str], before: Sequence[int]
) -> list[Figures]:
    """Read one document with every method; return its figures for each number of tokens before its end."""
    stops = [len(ids) - one for one in before]
    slices = [slice(stop - ROWS, stop) for stop in stops]
    bounds = [{"streaming": Bound(), "best keys": Bound()} for _ in slices]
    dense_BL = last_rows(stack, ids, "dense", slices, bounds)
    mine_MBL = [last_rows(stack, ids, method, slices) for method in methods]
    found = []
    for b, tokens in enumerate(before):
        layers = range(len(dense_BL[b]))
        ranks_LM = [rank_correlations([mine[b][n] for mine in mine_MBL], dense_BL[b][n]) for n in layers]
        by_method = {
            method: {
                "cosine": [cosine(mine[b][n], dense_BL[b][n]) for n in layers],
                "ranks": [ranks_M[m] for ranks_M in ranks_LM],
            }
            for m, (method, mine) in enumerate(zip(methods, mine_MBL, strict=True))
        }
        lemma = {
            name: {"error": sums.error / sums.count, "bound": sums.bound / sums.count, "most": sums.most}
            for name, sums in bounds[b].items()
        }
        found.append({"before": tokens, "methods": by_method, "lemma": lemma})
    return found


def tables(found: Sequence[Figures]) -> str:
    """Write the tables in Markdown, for each number of tokens before the end."""
    places = sorted({one["before"] for one in found})
    return "\n\n".join(_tables([one for one in found if one["before"] == place]) for place in places)


def _tables(each: Sequence[Figures]) -> str:
    """Write the tables of documents whose rows end at one place."""
    first = each[0]
    methods = list(first["methods"])
    layers = list(range(len(first["methods"][methods[0]]["cosine"])))
    kinds = [(method, kind) for method in methods for kind in ("cosine", "ranks")]
    rows = [
        [
            name,
            *(_mean([_over(one["methods"][method][kind], kept) for one in each]) for method, kind in kinds),
        ]
        for name, kept in (*((str(layer), [layer]) for layer in layers), ("all", layers))
    ]
    lemma = [
        [
            name,
            *(_mean([one["lemma"][name][kind] for one in each], 5) for kind in ("error", "bound")),
            f"{max(one['lemma'][name]['most'] for one in each):.3f}",
        ]
        for name in first["lemma"]
    ]
    parts = (
        f"{len(each)} documents, {ROWS} rows that end {first['before']} before the last",
        markdown(["layer", *(f"`{method}`, {kind}" for method, kind in kinds)], rows),
        markdown(["Lemma 1, kept keys", "error", "bound", "largest share of the bound"], lemma),
    )
    return "\n\n".join(parts)


def _over(by_layer: Sequence[float], layers: Sequence[int]) -> float:
    return sum(by_layer[layer] for layer in layers) / len(layers)


def _mean(values: Sequence[float], places: int = 3) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def _read(path: Path) -> list[Figures]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(given: Sequence[str] | None = None) -> None:
    load(METHODS)
    parser = parser_of(__doc__ or "", questions=40)
    parser.add_argument("--methods", type=known_method, nargs="+", default=METHODS_SHOWN)
    parser.add_argument("--before", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shard", type=told(parse_shard), default=(0, 1), metavar="I/N")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no document is begun")
    parser.add_argument("--tables", type=Path, nargs="+", default=[], metavar="FILE")
    arguments = parser.parse_args(given)
    if arguments.tables:
        print(tables([one for path in arguments.tables for one in _read(path)]))
        return
    if arguments.out is None:
        parser.error("--out: a file for each document's figures")
    started, (first, step) = time.monotonic(), arguments.shard
    done = {one["document"] for one in _read(arguments.out)} if arguments.out.exists() else set()
    named = zip((path.stem for path in arguments.text), documents_of(arguments), strict=True)
    stack = load_model(model_of(arguments), arguments.device)
    for name, document in islice(named, first, None, step):
        if name in done:
            continue
        if time.monotonic() - started > 60 * arguments.minutes:
            print(f"{arguments.minutes:g} minutes are over: the documents left are not read", flush=True)
            break
        found = figures(stack, document.ids, arguments.methods, arguments.before)
        lines = [json.dumps({"document": name, "tokens": len(document.ids), **one}) for one in found]
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))
        print(f"{name}: read", flush=True)


if __name__ == "__main__":
    main()
