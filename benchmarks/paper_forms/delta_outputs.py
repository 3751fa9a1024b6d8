"""Outputs and the order of keys under the Δ correction, and what its Lemma 1 bounds (Willette et al. 2025,
Figures 3, 9, 11).

    python -m deltafront.benchmarks.paper_forms.delta_outputs --text FILE [FILE …] --tokens 130900

Each document is read densely and with every method, in one piece. Of 128 rows, by layer, over rows and heads:

cosine: between a head's output and dense attention's.
ranks: Spearman's correlation of a query's logits over the keys before those rows with dense attention's. The
queries and keys are those of that reading, as in the paper.

Lemma 1 is looked at for the dense reading's rows, with the keys that `streaming` keeps and with as many best
ones: the mean of what the difference of outputs misses of the dropped keys' part, the mean of its bound, and
the largest share of the bound that is reached.

--before: the rows end so many tokens before the document does. The correction's dense end is at most 255
rows, which are dense whatever came before. Shape suffixes as in `kernels.interface`; R rows, X kept keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    stack: LayerStack, ids: Sequence[int], method: str, rows: slice, bounds: dict[str, Bound] | None = None
) -> list[LastRows]:
    """By layer, of a reading with the method at any length. bounds: sums for Lemma 1's figures."""
    given, found = parse_method(method), list[LastRows]()
    options = {"min_tokens": 0} if "min_tokens" in given.values else {}
    attention = build(method_spec(given.name, {**given.values, **options}))

    def hook(layer: int, x: AttentionInput) -> torch.Tensor:
        out_BHTD = attended(attention, x, layer)
        kept = (out_BHTD[0, :, rows], x.q_BHTD[0, :, rows], x.k_BGSD[0, :, : rows.start])
        found.append(LastRows(*(part.clone() for part in kept)))
        if bounds is not None:
            _add_bounds(x, rows, bounds)
        return out_BHTD

    read_densely(stack, embedded(stack, ids), hook)
    return found


def cosine(mine: LastRows, dense: LastRows) -> float:
    pair = mine.out_HRD.float(), dense.out_HRD.float()
    return float(torch.nn.functional.cosine_similarity(*pair, dim=2).mean())


def rank_correlation(mine: LastRows, dense: LastRows) -> float:
    """The mean over heads and rows. Equal logits are ranked in the order of their keys."""
    group = mine.q_HRD.shape[0] // mine.k_GSD.shape[0]
    found = []
    for h in range(mine.q_HRD.shape[0]):
        ranks = []
        for one in (mine, dense):
            logit_RS = one.q_HRD[h].float() @ one.k_GSD[h // group].float().T
            order_RS = logit_RS.argsort(dim=1, stable=True)
            place_S = torch.arange(order_RS.shape[1], device=order_RS.device).expand_as(order_RS)
            ranks.append(torch.empty_like(order_RS).scatter_(1, order_RS, place_S).double())
        keys = ranks[0].shape[1]
        apart_R = (ranks[0] - ranks[1]).square().sum(1)
        found.append((1 - 6 * apart_R / (keys * (keys**2 - 1))).mean())
    return float(torch.stack(found).mean())


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


def _add_bounds(x: AttentionInput, rows: slice, bounds: dict[str, Bound]) -> None:
    streamed_NM = listed(x, StreamingSelector(StreamingOptions()).select(x, None, no_phase))[0, 0]
    row_R = torch.arange(rows.start, rows.stop, device=x.q_BHTD.device)
    key_S = torch.arange(rows.stop, device=row_R.device)
    seen_RS = key_S <= row_R[:, None]
    kept_RS = streamed_NM[row_R // BLOCK].repeat_interleave(BLOCK, dim=1)[:, : rows.stop] & seen_RS
    for h in range(x.q_BHTD.shape[1]):
        k_SD, v_SD = (kv[0, h // x.group, : rows.stop] for kv in (x.k_BGSD, x.v_BGSD))
        logit_RS = x.q_BHTD[0, h, rows].float() @ k_SD.float().T * x.scale
        logit_RS.masked_fill_(~seen_RS, -torch.inf)
        bounds["streaming"].add(*lemma_1(logit_RS, v_SD, kept_RS))
        bounds["best keys"].add(*lemma_1(logit_RS, v_SD, best(logit_RS, kept_RS.sum(1))))


def best(logit_RS: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """kept_RS: the `count` keys of the largest logits of each row."""
    order_RX = logit_RS.topk(int(count_R.max()), dim=1).indices
    within_RX = torch.arange(order_RX.shape[1], device=order_RX.device) < count_R[:, None]
    return torch.zeros_like(logit_RS, dtype=torch.bool).scatter_(1, order_RX, within_RX)


def main(given: Sequence[str] | None = None) -> None:
    load(METHODS)
    parser = parser_of(__doc__ or "", questions=40)
    parser.add_argument("--methods", type=known_method, nargs="+", default=METHODS_SHOWN)
    parser.add_argument("--before", type=int, default=0)
    arguments = parser.parse_args(given)
    stack, documents = load_model(model_of(arguments), arguments.device), documents_of(arguments)
    bounds = {"streaming": Bound(), "best keys": Bound()}
    figures_MFL = torch.zeros(len(arguments.methods), 2, stack.config.layers)
    for document in documents:
        stop = len(document.ids) - arguments.before
        rows = slice(stop - ROWS, stop)
        dense = last_rows(stack, document.ids, "dense", rows, bounds)
        for m, method in enumerate(arguments.methods):
            mine = last_rows(stack, document.ids, method, rows)
            for layer, pair in enumerate(zip(mine, dense, strict=True)):
                figures_MFL[m, :, layer] += torch.tensor([cosine(*pair), rank_correlation(*pair)])
    figures_MFL /= len(documents)
    print(f"{len(documents)} documents of {arguments.tokens} tokens, {ROWS} rows that end "
          f"{arguments.before} before the last\n")  # fmt: skip
    header = ["layer", *(f"`{method}`: cosine, ranks" for method in arguments.methods)]
    cells = [
        [name, *(", ".join(f"{number:.3f}" for number in method) for method in figures)]
        for name, figures in (
            *((str(layer), figures_MFL[:, :, layer].tolist()) for layer in range(stack.config.layers)),
            ("all", figures_MFL.mean(2).tolist()),
        )
    ]
    print(markdown(header, cells))
    lemma = [
        [name, f"{sums.error / sums.count:.5f}", f"{sums.bound / sums.count:.5f}", f"{sums.most:.3f}"]
        for name, sums in bounds.items()
    ]
    print("\n" + markdown(["Lemma 1, kept keys", "error", "bound", "largest share of the bound"], lemma))


if __name__ == "__main__":
    main()
