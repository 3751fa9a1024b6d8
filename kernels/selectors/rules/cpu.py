"""The selection rules in torch."""

import torch

from deltafront.kernels.interface import TileMask
from deltafront.kernels.selectors.rules.rule import LARGER, LEVELS, ROUNDING, TINY, Rule, check_scores

_FLOAT_BITS = 1 << 31


def select(score_BHNM: torch.Tensor, rule: Rule, first_block: int, *, with_scores: bool = False) -> TileMask:
    """Return the mask of tiles that `rule` keeps. Scores are >= 0; scores after the diagonal are ignored."""
    mask = compact(kept_table(score_BHNM, rule, first_block))
    if not with_scores:
        return mask
    kept_BHNM = score_BHNM.gather(-1, mask.index_BHNM.long())
    return TileMask(mask.index_BHNM, mask.count_BHN, kept_BHNM)


def kept_table(score_BHNM: torch.Tensor, rule: Rule, first_block: int) -> torch.Tensor:
    check_scores(score_BHNM, first_block)
    _, heads, rows, columns = score_BHNM.shape
    device = score_BHNM.device
    threshold_H11 = rule.thresholds(heads, device)[:, None, None]
    diagonal_N1 = torch.arange(rows, device=device)[:, None] + first_block
    column_M = torch.arange(columns, device=device)
    causal_NM = column_M <= diagonal_N1
    forced_NM = (column_M > diagonal_N1 - rule.window_blocks) | (column_M < rule.sink_blocks)
    forced_NM &= causal_NM
    ranked_NM = causal_NM & ~forced_NM if rule.outside else causal_NM
    any_BHN1 = torch.where(causal_NM, score_BHNM, 0.0).amax(-1, keepdim=True) > 0
    score_BHNM = torch.where(ranked_NM, score_BHNM, 0.0)
    top_BHN1 = score_BHNM.amax(-1, keepdim=True)

    if rule.kind == "cumulative":
        larger_BHN1 = torch.where(top_BHN1 < TINY, LARGER, 1.0)
        per_level_BHN1 = LEVELS / (top_BHN1 * larger_BHN1)
        level_BHNM = (score_BHNM * larger_BHN1 * per_level_BHN1 + 0.5).nan_to_num(0.0).int()
        need_BHN1 = threshold_H11 * level_BHNM.sum(-1, keepdim=True).float()
        floor_BHN1 = _highest_floor(level_BHNM, level_BHNM, forced_NM, need_BHN1, LEVELS + 2)
        kept_BHNM = (level_BHNM >= floor_BHN1) | (threshold_H11 >= 1.0)
    else:
        bits_BHNM = score_BHNM.contiguous().view(torch.int32)
        count_BHNM = ranked_NM.int().expand_as(bits_BHNM)
        need_BHN1 = torch.ceil(threshold_H11 * ranked_NM.sum(-1, keepdim=True).float() * ROUNDING)
        floor_BHN1 = _highest_floor(bits_BHNM, count_BHNM, forced_NM, need_BHN1, _FLOAT_BITS)
        kept_BHNM = bits_BHNM >= floor_BHN1
    return ((kept_BHNM | ~any_BHN1) & causal_NM) | forced_NM


def _highest_floor(
    level_BHNM: torch.Tensor,
    weight_BHNM: torch.Tensor,
    forced_NM: torch.Tensor,
    need_BHN1: torch.Tensor,
    limit: int,
) -> torch.Tensor:
    """Find, by bisection, the highest floor below `limit` (int64) such that the forced tiles and the tiles
    with level >= floor together weigh at least `need`."""
    low_BHN1 = torch.zeros_like(need_BHN1, dtype=torch.int64)
    high_BHN1 = torch.full_like(low_BHN1, limit)
    for _ in range((limit - 1).bit_length()):
        middle_BHN1 = (low_BHN1 + high_BHN1) // 2
        kept_BHNM = (level_BHNM >= middle_BHN1) | forced_NM
        enough_BHN1 = torch.where(kept_BHNM, weight_BHNM, 0).sum(-1, keepdim=True).float() >= need_BHN1
        low_BHN1 = torch.where(enough_BHN1, middle_BHN1, low_BHN1)
        high_BHN1 = torch.where(enough_BHN1, high_BHN1, middle_BHN1)
    return low_BHN1


def compact(kept_BHNM: torch.Tensor) -> TileMask:
    order_BHNM = torch.argsort(kept_BHNM.byte(), dim=-1, descending=True, stable=True)
    return TileMask(order_BHNM.to(torch.int16), kept_BHNM.sum(-1, dtype=torch.int32))
