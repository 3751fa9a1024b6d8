"""How far the difference of one dense row holds for the rows after it: Δ Attention's premise on a model
(Willette et al. 2025, section 3, Figure 6b).

    python -m deltafront.benchmarks.paper_forms.delta_decay --text FILE [FILE …] --tokens 130900 --gamma 8 64

One dense pass over each document with hidden facts. In each layer the method's output is taken off dense
attention's: the difference that the correction carries from every γ-th row. For each γ:

cosine: between that row's difference and those of the γ - 1 rows after it, the mean over rows, heads and
layers.
left: the squared difference that remains with the correction, over that without. Above 1 it does harm.
left at facts: the same over rows of facts alone; few dense rows stand in facts that are shorter than γ.
at once: what remains at the facts if a dense row stood at each fact's first token.

In brackets: 95% of what whole documents give, drawn with replacement, if there are several.
Rows that the method reads whole are left out. Perplexity by γ (Figure 6a) is `benchmarks.accuracy`'s, with
--tasks prose and --methods streaming+delta:gamma=8 … Shape suffixes as in `kernels.interface`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deltafront.benchmarks.accuracy.paired import ratio_of_sums
from deltafront.benchmarks.paper_forms.levels import METHODS, documents_of, model_of, parser_of
from deltafront.benchmarks.reader import known_method, parse_method
from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import load, method_spec
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack


@dataclass
class Held:
    """Sums over rows of one γ, heads and layers. rows: those after dense rows."""

    cosine: float = 0.0
    rows: int = 0
    before: float = 0.0
    after: float = 0.0
    facts_before: float = 0.0
    facts_after: float = 0.0
    facts_at_once: float = 0.0

    def add(self, difference_HTD: torch.Tensor, gamma: int, first: int, facts: Sequence[range]) -> None:
        """first: the first row that the method does not read whole."""
        row_T = torch.arange(difference_HTD.shape[1], device=difference_HTD.device)
        dense_T = row_T // gamma * gamma
        counted_T = dense_T >= first
        carried_HTD = difference_HTD[:, dense_T]
        left_T = (difference_HTD - carried_HTD).square().sum((0, 2))
        whole_T = difference_HTD.square().sum((0, 2))
        behind_T = counted_T & (row_T > dense_T)
        same_HT = torch.nn.functional.cosine_similarity(difference_HTD, carried_HTD, dim=2)
        self.cosine += float(same_HT[:, behind_T].sum())
        self.rows += int(behind_T.sum()) * difference_HTD.shape[0]
        self.before += float(whole_T[counted_T].sum())
        self.after += float(left_T[counted_T].sum())
        for fact in facts:
            if fact.start // gamma * gamma >= first:
                rows = slice(fact.start, fact.stop)
                near_HTD = difference_HTD[:, rows] - difference_HTD[:, fact.start, None]
                self.facts_before += float(whole_T[rows].sum())
                self.facts_after += float(left_T[rows].sum())
                self.facts_at_once += float(near_HTD.square().sum())


@torch.inference_mode()
def held(stack: LayerStack, document: Document, method: str, gammas: Sequence[int]) -> dict[int, Held]:
    """By γ, over one document."""
    given = parse_method(method)
    sparse = build(method_spec(given.name, {**given.values, "min_tokens": 0}))
    dense, found = build(method_spec("dense")), {gamma: Held() for gamma in gammas}

    def hook(layer: int, x: AttentionInput) -> torch.Tensor:
        out_BHTD = attended(dense, x, layer)
        difference_HTD = (out_BHTD.float() - attended(sparse, x, layer).float())[0]
        changed_T = difference_HTD.abs().amax((0, 2)) > 1e-3 * out_BHTD.abs().max()
        first = int(changed_T.int().argmax()) if bool(changed_T.any()) else len(changed_T)
        for gamma, sums in found.items():
            sums.add(difference_HTD, gamma, first, document.facts)
        return out_BHTD

    read_densely(stack, embedded(stack, document.ids), hook)
    return found


def row(gamma: int, each: Sequence[Held]) -> str:
    def ratio(above: str, below: str) -> str:
        found = ratio_of_sums([(getattr(one, above), getattr(one, below)) for one in each])
        if found is None:
            return "–"
        value, drawn = found
        return f"{value:.3f}" + (f" ({drawn[0]:.3f} to {drawn[1]:.3f})" if drawn else "")

    cells = (
        ratio("cosine", "rows"),
        ratio("after", "before"),
        ratio("facts_after", "facts_before"),
        ratio("facts_at_once", "facts_before"),
    )
    return f"| {gamma} | " + " | ".join(cells) + " |"


def main(given: Sequence[str] | None = None) -> None:
    load(METHODS)
    parser = parser_of(__doc__ or "", questions=40)
    parser.add_argument("--method", type=known_method, default="streaming")
    parser.add_argument("--gamma", type=int, nargs="+", default=[8, 16, 64, 256])
    arguments = parser.parse_args(given)
    stack, documents = load_model(model_of(arguments), arguments.device), documents_of(arguments)
    lengths = [len(fact) for document in documents for fact in document.facts]
    each = [held(stack, document, arguments.method, arguments.gamma) for document in documents]
    print(f"{len(documents)} documents of {arguments.tokens} tokens, {arguments.method}, facts of "
          f"{statistics.median(lengths):g} tokens (median)\n")  # fmt: skip
    print("| γ | cosine | left | left at facts | at once |\n|---|---|---|---|---|")
    for gamma in arguments.gamma:
        print(row(gamma, [one[gamma] for one in each]))


if __name__ == "__main__":
    main()
