"""Anchor slots and tile scores on the CPU. Shape suffixes: R rows of a block."""

import torch
from torch.nn import functional

from deltafront.kernels.anchor_scan import AnchorRuns, cpu_scan
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.selectors.anchors.form import AnchorSettings, BlockAnchors, SideSettings


def cpu_summarise(
    x_BGSD: torch.Tensor, form: AnchorSettings, side: SideSettings, first_block: int = 0
) -> BlockAnchors:
    """Fill the anchor slots of x's blocks, in float32. x begins at the prompt's block `first_block`."""
    runs = cpu_scan(x_BGSD, form.cos, BLOCK, centred=form.centred)
    strict = _fill(x_BGSD, runs, side, first_block)
    if side.relax is None:
        return strict
    crowded_BGM1 = (runs.runs_BGC > side.cap)[..., None]
    relaxed = cpu_scan(x_BGSD, form.cos - side.relax, BLOCK, centred=form.centred)
    loose = _fill(x_BGSD, relaxed, side, first_block)
    return BlockAnchors(
        torch.where(crowded_BGM1[..., None], loose.vector_BGMAD, strict.vector_BGMAD),
        torch.where(crowded_BGM1, loose.first_BGMA, strict.first_BGMA),
        torch.where(crowded_BGM1, loose.count_BGMA, strict.count_BGMA),
    )


def _fill(x_BGSD: torch.Tensor, runs: AnchorRuns, side: SideSettings, first_block: int) -> BlockAnchors:
    batch, heads, rows, dim = x_BGSD.shape
    blocks = runs.runs_BGC.shape[2]
    padding = blocks * BLOCK - rows
    x_BGMRD = functional.pad(x_BGSD.float(), (0, 0, 0, padding)).view(batch, heads, blocks, BLOCK, dim)
    run_BGMR = functional.pad(runs.run_BGS, (0, padding), value=-1).view(batch, heads, blocks, BLOCK)
    is_anchor_BGMR = functional.pad(runs.is_anchor_BGS, (0, padding)).view(batch, heads, blocks, BLOCK)

    runs_BGM1 = runs.runs_BGC[..., None]
    crowded_BGM1 = runs_BGM1 > side.cap
    merged_BGMR = torch.where(crowded_BGM1, ((run_BGMR + 1) * side.cap - 1) // runs_BGM1, run_BGMR)
    picked_BGMR = torch.where(crowded_BGM1, merged_BGMR * runs_BGM1 // side.cap == run_BGMR, True)
    member_BGMR = (run_BGMR >= 0) & picked_BGMR
    slot_BGMRA = merged_BGMR[..., None] == torch.arange(side.cap, device=x_BGSD.device)
    member_BGMRA = slot_BGMRA & member_BGMR[..., None]
    first_row_BGMRA = slot_BGMRA & (picked_BGMR & is_anchor_BGMR)[..., None]

    count_BGMA = member_BGMRA.sum(3, dtype=torch.float32)
    row_BGMA = first_row_BGMRA.int().argmax(3)
    vector_BGMAD = x_BGMRD.gather(3, row_BGMA[..., None].expand(-1, -1, -1, -1, dim))
    start_M1 = (torch.arange(blocks, device=x_BGSD.device)[:, None] + first_block) * BLOCK
    return BlockAnchors(vector_BGMAD, (row_BGMA + start_M1).int(), count_BGMA)


def cpu_scores(x: AttentionInput, queries: BlockAnchors, keys: BlockAnchors) -> torch.Tensor:
    """Compute tile scores, float32 score_BHNM (DeltaAttention section 4.3, changed by docs/decisions/0003).

    The weight of key slot b for query slot a is n_b exp(q_a . k_b scale), normalised over all key slots up to
    a. n_b is the number of rows in slot b that are not after a's first row. A tile's score is the sum of
    weights over its key slots and query slots.
    """
    batch, heads, blocks, slots, dim = queries.vector_BGMAD.shape
    groups, columns, key_slots = keys.count_BGMA.shape[1:]
    q_BGXD = queries.vector_BGMAD.reshape(batch, groups, -1, dim)
    k_BGYD = keys.vector_BGMAD.float().reshape(batch, groups, -1, dim)
    logit_BHNAY = (q_BGXD @ k_BGYD.transpose(2, 3) * x.scale).view(batch, heads, blocks, slots, -1)

    first_BHNA1 = queries.first_BGMA[..., None]
    key_first_BH11Y = keys.first_BGMA.reshape(batch, groups, 1, 1, -1).repeat_interleave(x.group, dim=1)
    key_count_BH11Y = keys.count_BGMA.reshape(batch, groups, 1, 1, -1).repeat_interleave(x.group, dim=1)
    seen_BHNAY = torch.minimum((first_BHNA1 - key_first_BH11Y + 1).float(), key_count_BH11Y)
    weight_BHNAY = seen_BHNAY.clamp(min=0) * (queries.count_BGMA > 0)[..., None]
    mass_BHNAY = torch.softmax(logit_BHNAY + weight_BHNAY.log(), dim=-1).nan_to_num(0.0)
    return mass_BHNAY.view(batch, heads, blocks, slots, columns, key_slots).sum(dim=(3, 5))
