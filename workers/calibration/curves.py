"""Measures each head's error curve: the output error of sparse prefill, by density, at several quotas. A
quota is the share of attention scores that the kept tiles must reach (top-p).

During one dense prefill, sampled query blocks compare attention over the tiles that a quota keeps with
attention over all tiles. Errors are measured after the output projection, where heads and layers are
comparable. Rows with facts are averaged separately, since they are few and the answers depend only on them.

Shape suffixes also: I quotas, R rows of a query block; N, M query and key blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.workers.calibration.dense_pass import embedded, read_densely, state_spec
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.decoder.stack import LayerStack

QUOTAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Shares of the attention scores, outside sink and window, that the kept tiles must reach (top-p)."""

SAMPLED_BLOCKS, FACT_BLOCKS = 24, 16
"""Number of query blocks of a text that are compared, and of query blocks with facts."""


@dataclass(frozen=True)
class Curves:
    """The error curves of all heads in layers without sliding windows.

    Args:
        density_LHI: Share of causal tiles that each quota keeps.
        error_LHI: Relative mean squared error of the layer's attention output.
        fact_error_LHI: The same error over only the rows with facts; equal to error_LHI for a text without
            facts.
    """

    density_LHI: torch.Tensor
    error_LHI: torch.Tensor
    fact_error_LHI: torch.Tensor
    quotas: tuple[float, ...]


def curves(
    stack: LayerStack, document: Document, selector: ScoredSelector, quotas: Sequence[float] = QUOTAS
) -> Curves:
    """Measure a text's error curves (float32, on the CPU) in one dense prefill."""
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    prose, facts = sampled_blocks(-(-len(document.ids) // BLOCK)), fact_blocks(document.facts)

    def hook(layer: int, x: AttentionInput) -> None:
        if layer in stack.config.window_layers:
            return
        score_BHNM = selector.scores(x, selector.new_state(state_spec(x, layer)), no_phase)
        how = selector.rule, stack.layer(layer).output_weight_CO, quotas
        density_HI, error_HI = layer_curve(x, score_BHNM, *how, prose)
        fact_error_HI = layer_curve(x, score_BHNM, *how, facts)[1] if facts else error_HI
        layers.append((density_HI, error_HI, fact_error_HI))

    read_densely(stack, embedded(stack, document.ids), hook)
    density, error, fact_error = (torch.stack(each).cpu() for each in zip(*layers, strict=True))
    return Curves(density, error, fact_error, tuple(quotas))


def layer_curve(
    x: AttentionInput,
    score_BHNM: torch.Tensor,
    rule: Rule,
    output_CO: torch.Tensor,
    quotas: Sequence[float],
    blocks: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return density_HI and error_HI (float32) of one layer, over the given query blocks."""
    selected_IHNM = _selected(score_BHNM[:, :, blocks], blocks, rule, quotas)
    causal_N = torch.tensor(blocks, device=score_BHNM.device) + 1
    density_HI = (selected_IHNM.sum(3) / causal_N).mean(2).T
    heads, dim = x.q_BHTD.shape[1], x.q_BHTD.shape[3]
    output_HCD = output_CO.float().view(-1, heads, dim).transpose(0, 1)
    gram_HDD = output_HCD.transpose(1, 2) @ output_HCD  # |W e|² = eᵀ(WᵀW)e
    error_HI = torch.zeros_like(density_HI, dtype=torch.float32)
    total = torch.zeros((), device=error_HI.device)
    for n, block in enumerate(blocks):
        out_HRD, error_IHRD = _block_error(x, block, selected_IHNM[:, :, n, : block + 1])
        error_HI += ((error_IHRD @ gram_HDD) * error_IHRD).sum((2, 3)).T
        total += torch.einsum("hrd,hcd->rc", out_HRD, output_HCD).square().sum()
    return density_HI.float(), error_HI / total


def forced_density(tokens: int, rule: Rule) -> float:
    """Return the density of a text's forced tiles: that of quota 0, for every head."""
    forced = rule.sink_blocks + rule.window_blocks
    return fmean(min(1.0, forced / (block + 1)) for block in sampled_blocks(-(-tokens // BLOCK)))


def sampled_blocks(count: int) -> list[int]:
    """Sample SAMPLED_BLOCKS of `count` query blocks, evenly by their number of causal tiles."""
    parts = (torch.arange(SAMPLED_BLOCKS) + 0.5) / SAMPLED_BLOCKS
    return sorted(set((parts.sqrt() * count).long().tolist()))


def fact_blocks(facts: Sequence[range]) -> list[int]:
    """Choose at most FACT_BLOCKS of the query blocks in which a fact begins, evenly among these blocks."""
    blocks = sorted({fact.start // BLOCK for fact in facts})
    count = min(FACT_BLOCKS, len(blocks))
    return [blocks[(2 * n + 1) * len(blocks) // (2 * count)] for n in range(count)]


def _selected(
    score_BHNM: torch.Tensor, blocks: Sequence[int], rule: Rule, quotas: Sequence[float]
) -> torch.Tensor:
    """Return bool_IHNM: the tiles that `rule` keeps at each quota. Quota 0 keeps only sink and window."""
    column_M = torch.arange(score_BHNM.shape[3], device=score_BHNM.device)
    block_N1 = torch.tensor(blocks, device=score_BHNM.device)[:, None]
    causal_NM = column_M <= block_N1
    forced_NM = ((column_M > block_N1 - rule.window_blocks) | (column_M < rule.sink_blocks)) & causal_NM
    ranked_HNM = torch.where(causal_NM & ~forced_NM, score_BHNM[0].double(), 0.0)
    ordered_HNM, order_HNM = ranked_HNM.sort(dim=-1, descending=True)
    before_HNM = ordered_HNM.cumsum(-1) - ordered_HNM
    sum_HN1 = ranked_HNM.sum(-1, keepdim=True)
    selected_IHNM = torch.stack([before_HNM < quota * sum_HN1 for quota in quotas])
    selected_IHNM = torch.zeros_like(selected_IHNM).scatter(
        -1, order_HNM.expand_as(selected_IHNM), selected_IHNM
    )
    all_I111 = torch.tensor(quotas, device=sum_HN1.device)[:, None, None, None] >= 1.0
    return ((selected_IHNM | all_I111) & causal_NM) | forced_NM


def _block_error(
    x: AttentionInput, block: int, selected_IHM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    first, last = block * BLOCK, min((block + 1) * BLOCK, x.q_BHTD.shape[2])
    rows, tiles = last - first, block + 1
    outs, errors = [], []
    for head in range(x.q_BHTD.shape[1]):
        q_RD = x.q_BHTD[0, head, first:last].float()
        k_SD, v_SD = (t[0, head // x.group, :last].float() for t in (x.k_BGSD, x.v_BGSD))
        logit_RS = q_RD @ k_SD.T * x.scale
        future_RS = torch.ones(rows, rows, dtype=torch.bool, device=q_RD.device).triu(1)
        logit_RS[:, first:].masked_fill_(future_RS, float("-inf"))
        mass_RS = torch.nn.functional.pad(logit_RS.softmax(-1), (0, tiles * BLOCK - last))
        v_SD = torch.nn.functional.pad(v_SD, (0, 0, 0, tiles * BLOCK - last))
        mass_MRK = mass_RS.view(rows, tiles, BLOCK).transpose(0, 1)
        part_MRD = mass_MRK @ v_SD.view(tiles, BLOCK, -1)
        selected_IM = selected_IHM[:, head].float()
        sum_IR = selected_IM @ mass_MRK.sum(-1)
        out_RD = part_MRD.sum(0)
        sparse_IRD = torch.einsum("im,mrd->ird", selected_IM, part_MRD) / sum_IR[..., None]
        outs.append(out_RD)
        errors.append(sparse_IRD - out_RD)
    return torch.stack(outs), torch.stack(errors, dim=1)
