"""XAttention's search for each head's minimum threshold by the model's performance (Xu et al. 2025, section
2.3).

    python -m deltafront.benchmarks.paper_forms.minimum_threshold --method xattention_paper:stride=16 \
        --density 0.1 0.2 --text FILE [FILE …] --tokens 8192 --profile OUT
    python -m deltafront.benchmarks.accuracy --profile OUT --methods xattention_paper:density=DENSITY …

P(h, m) is the model's performance after only the threshold of head h was adjusted m times: it begins at 0.9,
and an adjustment multiplies it by 0.9. Performance is the mean log-probability of the right answers' tokens,
with document and questions prefilled by the method. It is measured after 4, 8, 16 and 24 adjustments and
interpolated between them. The paper's dynamic program then chooses the adjustments that cost least
performance. `deltafront calibrate --allocation threshold` runs the same program on errors of heads' outputs.

Shape suffixes are those of `kernels.interface`; L layers, I thresholds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from deltafront.benchmarks.accuracy.predictions import predicted
from deltafront.benchmarks.paper_forms.levels import (
    documents_of,
    level_of,
    levels_parser_of,
    method_of,
    model_of,
    write_profile,
)
from deltafront.kernels.build import build
from deltafront.kernels.interface import Attention, AttentionInput, no_phase
from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely, state_spec
from deltafront.workers.calibration.method_levels import selector_of
from deltafront.workers.calibration.probes import Document, with_answers
from deltafront.workers.calibration.thresholds import FACTOR, START, adjusted_quotas
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack

MEASURED = (24, 16, 8, 4, 0)
"""Numbers of adjustments after which the model is measured, descending, so that the thresholds ascend."""
QUOTAS = tuple(START * FACTOR**count for count in MEASURED)


class Performance:
    """Measures the model's performance on one document, with one head's threshold changed. It caches each
    layer's inputs of the unadjusted model, so that only that head's layer and later layers run again.

    Raises ValueError for a document without questions.
    """

    @torch.inference_mode()
    def __init__(self, stack: LayerStack, document: Document, method: MethodSpec) -> None:
        self._ids, answers = with_answers(document)
        if not answers:
            raise ValueError("the model's performance needs documents with questions: give --questions")
        self._stack, self._answers = stack, answers
        self._method = method_spec(method.name, {**method.values, "density": 1.0})
        self._base = self._with({})
        self._entering: list[torch.Tensor] = []
        density = []

        def hook(layer: int, x: AttentionInput) -> torch.Tensor:
            density.append(densities(x, self._method, layer))
            return attended(self._base, x, layer)

        hidden_TC = embedded(stack, self._ids)
        for layer in stack.layers:
            self._entering.append(hidden_TC)
            hidden_TC = read_densely(stack, hidden_TC, hook, range(layer, layer + 1))
        self.unadjusted = self._performance(hidden_TC)
        self.density_LHI = torch.stack(density)

    @torch.inference_mode()
    def adjusted(self, layer: int, head: int, quota: float) -> float:
        """Return the performance with only this head's threshold changed."""
        method = self._with({(layer, head): quota})
        hook = partial(_attend, method)
        later = range(layer, self._stack.layers.stop)
        return self._performance(read_densely(self._stack, self._entering[layer], hook, later))

    def _with(self, changed: dict[tuple[int, int], float]) -> Attention:
        heads = range(self._stack.config.q_heads)
        return build(
            self._method, lambda layer, _tokens: [changed.get((layer, head), START) for head in heads]
        )

    def _performance(self, hidden_TC: torch.Tensor) -> float:
        next_A = torch.tensor([self._ids[place + 1] for place in self._answers])
        return float(predicted(self._stack, hidden_TC[self._answers], next_A)[0].mean())


def _attend(method: Attention, layer: int, x: AttentionInput) -> torch.Tensor:
    return attended(method, x, layer)


def densities(x: AttentionInput, method: MethodSpec, layer: int) -> torch.Tensor:
    """Compute float64 density_HI of a layer's heads at the thresholds QUOTAS, on the CPU."""
    selector, kept = selector_of(method), []
    for quota in QUOTAS:
        selector.thresholds = lambda _layer, _tokens, quota=quota: [quota] * x.q_BHTD.shape[1]
        mask = selector.select(x, selector.new_state(state_spec(x, layer)), no_phase)
        kept.append(mask.count_BHN[0].sum(1).double().cpu())
    return torch.stack(kept, dim=1) / (x.query_blocks * (x.query_blocks + 1) / 2)


def head_losses(measured: Sequence[Performance], layers: int, heads: int) -> torch.Tensor:
    """Compute float64 loss_HI for the heads of all layers: the performance lost by adjusting one head."""
    rows = []
    for layer in range(layers):
        for head in range(heads):
            rows.append(
                [
                    sum(one.unadjusted - one.adjusted(layer, head, quota) for one in measured) / len(measured)
                    if count
                    else 0.0
                    for count, quota in zip(MEASURED, QUOTAS, strict=True)
                ]
            )
        print(f"layer {layer}: {len(rows)} heads measured", file=sys.stderr, flush=True)
    return torch.tensor(rows, dtype=torch.float64)


def main(given: Sequence[str] | None = None) -> None:
    parser = levels_parser_of(__doc__ or "", "xattention_paper")
    parser.add_argument("--density", type=float, nargs="+", required=True)
    arguments = parser.parse_args(given)
    method = method_of(arguments)
    stack = load_model(model_of(arguments), arguments.device)
    documents = documents_of(arguments)
    measured = [Performance(stack, document, method) for document in documents]
    layers, heads = stack.config.layers, stack.config.q_heads
    loss_HI = head_losses(measured, layers, heads)
    density_HI = torch.stack([one.density_LHI for one in measured]).mean(0).flatten(0, 1)
    levels = []
    for density in sorted(arguments.density):
        chosen = adjusted_quotas(density_HI, loss_HI, QUOTAS, density)
        thresholds = [chosen[heads * layer : heads * (layer + 1)] for layer in range(layers)]
        levels.append(level_of(stack, documents, method, thresholds))
        print(f"{density:g} asked for: {method.name}:density={levels[-1].density}", flush=True)
    write_profile(arguments, method, levels)


if __name__ == "__main__":
    main()
