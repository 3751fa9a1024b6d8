"""Choosing the next token, one row per request, independent of what else is in the batch.

Randomness is counter based: a row's noise is a function of (seed, position, token id) alone, so a stream
is the same in any batch, on any worker, and when it is continued elsewhere from the same position.

Shape suffixes: R requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..messages import Sampling

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment, as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a batch as tensors; made once per batch, not per step.

    drawn: rows with a temperature above 0 (the others are greedy), as row indices, with their temperature,
    seed and filter limits. filtered: which of the drawn rows use top-k or top-p.
    """

    drawn: torch.Tensor | None
    temperature_R1: torch.Tensor
    seed_R: torch.Tensor
    filtered: torch.Tensor | None
    top_k_R: torch.Tensor
    top_p_R1: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab: int, device: torch.device) -> SamplingRows:
        drawn = [index for index, row in enumerate(rows) if row.temperature > 0]
        chosen = [rows[index] for index in drawn]
        filtered = [at for at, row in enumerate(chosen) if 0 < row.top_k < vocab or row.top_p < 1]
        limits = [chosen[at] for at in filtered]
        top_k = [min(row.top_k, vocab) if row.top_k > 0 else vocab for row in limits]

        def tensor(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            drawn=tensor(drawn, torch.int64) if drawn else None,
            temperature_R1=tensor([row.temperature for row in chosen], torch.float32)[:, None],
            seed_R=tensor([_signed(row.seed) for row in chosen], torch.int64),
            filtered=tensor(filtered, torch.int64) if filtered else None,
            top_k_R=tensor(top_k, torch.int64),
            top_p_R1=tensor([row.top_p for row in limits], torch.float32)[:, None],
        )


def sample(
    logits_RV: torch.Tensor, rows: SamplingRows, positions_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token ids (int64 [R]) and their log-probabilities under the unmodified distribution (float32).

    positions_R: absolute position of the token to be chosen. Temperature, then top-k, then top-p of what is
    left, as transformers' warpers do; the draw is Gumbel's argmax, which needs no sum over the vocabulary.
    """
    logits_RV = logits_RV.to(torch.float32)
    ids_R = logits_RV.argmax(-1)
    if rows.drawn is not None:
        chosen_RV = logits_RV.index_select(0, rows.drawn)
        scaled_RV = (chosen_RV - chosen_RV.amax(-1, keepdim=True)) / rows.temperature_R1
        if rows.filtered is not None:
            kept_RV = _filter(scaled_RV.index_select(0, rows.filtered), rows.top_k_R, rows.top_p_R1)
            scaled_RV = scaled_RV.index_copy(0, rows.filtered, kept_RV)
        noise_RV = gumbel(rows.seed_R, positions_R.index_select(0, rows.drawn), logits_RV.shape[1])
        ids_R = ids_R.index_copy(0, rows.drawn, (scaled_RV.to(torch.float64) + noise_RV).argmax(-1))
    logprob_RV = logits_RV.log_softmax(-1)
    return ids_R, logprob_RV.gather(1, ids_R[:, None])[:, 0]


def gumbel(seed_R: torch.Tensor, positions_R: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise [R, V] in float64, a pure function of (seed, position, token id).

    The hash is splitmix64's finaliser, applied to the seed, the position and the token in turn. Tensor
    integers wrap around, as the algorithm wants.
    """
    stream_R = _mix(_mix(seed_R * _GOLDEN + _GOLDEN) + positions_R.to(torch.int64) * _GOLDEN)
    token_V = torch.arange(1, vocab + 1, device=seed_R.device, dtype=torch.int64) * _GOLDEN
    bits_RV = _mix(stream_R[:, None] + token_V)
    uniform_RV = (_shift(bits_RV, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform_RV))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _filter(scaled_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """-inf where top-k and then top-p drop a token. Tokens that tie with the last one kept are kept."""
    ordered_RV = scaled_RV.sort(-1, descending=True).values
    rank_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    ordered_RV = ordered_RV.masked_fill(rank_V >= top_k_R[:, None], float("-inf"))
    mass_RV = ordered_RV.softmax(-1).to(torch.float64)
    before_RV = mass_RV.cumsum(-1) - mass_RV
    kept_R1 = (((before_RV < top_p_R1) | (top_p_R1 >= 1)) & (rank_V < top_k_R[:, None])).sum(-1, keepdim=True)
    threshold_R1 = ordered_RV.gather(1, kept_R1.clamp(min=1) - 1)
    return scaled_RV.masked_fill(scaled_RV < threshold_R1, float("-inf"))


def _signed(seed: int) -> int:
    """Any integer seed as a signed 64-bit number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
