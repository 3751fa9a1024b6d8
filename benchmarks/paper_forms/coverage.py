"""Calibrates thresholds by DeltaAttention's procedure (section 2.5; r = 0.75 and 0.90 in section 7.3): each
head gets the smallest threshold whose tiles cover a share of its attention mass.

    python -m deltafront.benchmarks.paper_forms.coverage --method dpxa_thesis --coverage 0.75 0.90 \
        --text FILE [FILE …] --tokens 8192 --profile OUT
    python -m deltafront.benchmarks.accuracy --profile OUT --methods dpxa_thesis:density=DENSITY …

Documents are prefilled densely. A threshold's coverage is the exact attention mass of its tiles, averaged
over query blocks and documents. The script prints, for each coverage, the density of prefill with its
thresholds on the same documents. A request selects the thresholds by this density.

Shape suffixes are those of `kernels.interface`; L layers, I thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from deltafront.benchmarks.paper_forms.levels import (
    documents_of,
    level_of,
    levels_parser_of,
    method_of,
    model_of,
    write_profile,
)
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.selectors.rules.cpu import kept_table
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.workers.calibration.dense_pass import embedded, read_densely, state_spec
from deltafront.workers.calibration.method_levels import selector_of
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack

THRESHOLDS = tuple(step / 64 for step in range(1, 65))
"""Candidate thresholds of a head, ascending. The last keeps all tiles."""


def true_masses(x: AttentionInput) -> torch.Tensor:
    """Compute float32 true_BHNM: the exact attention mass of each tile, averaged over the tile's rows."""
    batch, heads = x.q_BHTD.shape[:2]
    groups, _, dim = x.k_BGSD.shape[1:]
    device = x.q_BHTD.device
    true_BHNM = torch.zeros((batch, heads, x.query_blocks, x.key_blocks), device=device)
    k_BGSD = x.k_BGSD.float()
    for block in range(x.query_blocks):
        q_BHRD = x.q_BHTD[:, :, block * BLOCK : (block + 1) * BLOCK].float()
        rows, start = q_BHRD.shape[2], x.q_start + block * BLOCK
        seen = start + rows
        stacked = q_BHRD.reshape(batch, groups, -1, dim)
        logit_BHRS = (stacked @ k_BGSD[:, :, :seen].transpose(2, 3)).view(batch, heads, rows, seen)
        future_RS = torch.arange(seen, device=device) > torch.arange(start, seen, device=device)[:, None]
        mass_BHRS = (logit_BHRS * x.scale).masked_fill_(future_RS, float("-inf")).softmax(-1)
        mass_BHS = functional.pad(mass_BHRS.mean(2), (0, -seen % BLOCK))
        tiles = mass_BHS.view(batch, heads, -1, BLOCK).sum(-1)
        true_BHNM[:, :, block, : tiles.shape[-1]] = tiles
    return true_BHNM


def covered(score_BHNM: torch.Tensor, true_BHNM: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Compute float64 coverage_HI: each threshold's share of a whole prompt's attention mass."""
    whole_BHN = true_BHNM.double().sum(-1)
    shares = []
    for threshold in THRESHOLDS:
        kept_BHNM = kept_table(score_BHNM, replace(rule, threshold=threshold), 0)
        shares.append(((true_BHNM.double() * kept_BHNM).sum(-1) / whole_BHN).mean(2)[0])
    return torch.stack(shares, dim=1)


@torch.inference_mode()
def coverages(stack: LayerStack, document: Document, selector: ScoredSelector) -> torch.Tensor:
    """Compute the coverage of each layer, head and threshold for one document: coverage_LHI, on the CPU."""
    layers = []

    def hook(layer: int, x: AttentionInput) -> None:
        score_BHNM = selector.scores(x, selector.new_state(state_spec(x, layer)), no_phase)
        layers.append(covered(score_BHNM, true_masses(x), selector.rule).cpu())

    read_densely(stack, embedded(stack, document.ids), hook)
    return torch.stack(layers)


def least_thresholds(coverage_LHI: torch.Tensor, wanted: float) -> list[list[float]]:
    """Return, for each layer and head, the smallest threshold whose coverage is at least `wanted`."""
    place_LH = (coverage_LHI < wanted - 1e-9).sum(-1).clamp(max=len(THRESHOLDS) - 1)
    return [[THRESHOLDS[place] for place in row] for row in place_LH.tolist()]


def main(given: Sequence[str] | None = None) -> None:
    parser = levels_parser_of(__doc__ or "", "dpxa_thesis")
    parser.add_argument("--coverage", type=float, nargs="+", default=[0.75, 0.90])
    arguments = parser.parse_args(given)
    method = method_of(arguments)
    stack = load_model(model_of(arguments), arguments.device)
    documents, selector = documents_of(arguments), selector_of(method)
    coverage_LHI = torch.stack([coverages(stack, one, selector) for one in documents]).mean(0)
    levels = []
    for wanted in sorted(arguments.coverage):
        levels.append(level_of(stack, documents, method, least_thresholds(coverage_LHI, wanted)))
        print(f"coverage {wanted:g}: {method.name}:density={levels[-1].density}", flush=True)
    write_profile(arguments, method, levels)


if __name__ == "__main__":
    main()
