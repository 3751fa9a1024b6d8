"""Chooses each request's next token, independently of the others in the batch. Shape suffixes: R requests, V
vocabulary.

The random noise depends only on (seed, position, token id), so a request samples the same tokens in any batch
and on any worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from deltafront.kernels.sampling.logit_options import LogitOptions

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment, as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a batch, one row per request, in tensors at fixed addresses (for CUDA
    graphs).

    Attributes:
        drawn_R: True: the row is sampled (temperature above 0). False: it is greedy.
        allowed_RW: One bit per token, 32 in a word. 1: the row may choose the token.
        draws: Any row is sampled. A host value, like the next two: they decide which kernels to launch.
        filters: Any row uses top-k or top-p.
        constrains: Any row may choose only some tokens.
        options: Options that change logits; None if no row has any.
    """

    drawn_R: torch.Tensor
    temperature_R1: torch.Tensor
    seed_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R1: torch.Tensor
    allowed_RW: torch.Tensor
    draws: bool = False
    filters: bool = False
    constrains: bool = False
    options: LogitOptions | None = None

    @classmethod
    def room(cls, rows: int, vocab: int, device: torch.device) -> SamplingRows:
        return cls(
            drawn_R=torch.zeros(rows, dtype=torch.bool, device=device),
            temperature_R1=torch.ones(rows, 1, device=device),
            seed_R=torch.zeros(rows, dtype=torch.int64, device=device),
            top_k_R=torch.ones(rows, dtype=torch.int64, device=device),
            top_p_R1=torch.ones(rows, 1, device=device),
            allowed_RW=torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device=device),
        )

    def first(self, count: int, *, draws: bool, filters: bool) -> SamplingRows:
        rows: dict[str, Any] = {n: x[:count] for n, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **rows, draws=draws, filters=filters)


def sample(
    logits_RV: torch.Tensor, rows: SamplingRows, positions_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's next token: the most likely one if greedy, otherwise a sample by the Gumbel-max
    trick.

    Logit options and allowed tokens apply to all rows. Sampled rows then apply temperature, min-p and top-k.
    As in transformers, top-p then applies to the tokens that top-k keeps.

    Args:
        positions_R: Absolute positions of the tokens to sample.

    Returns:
        Token ids (int64 [R]) and their log-probabilities under the unmodified distribution (float32).
    """
    logits_RV, options = logits_RV.to(torch.float32), rows.options
    allowed_RV = logits_RV if options is None else options.change(logits_RV, positions_R)
    if rows.constrains:
        allowed_RV = _constrain(allowed_RV, rows.allowed_RW)
    ids_R = allowed_RV.argmax(-1)
    if rows.draws:
        scaled_RV = (allowed_RV - allowed_RV.amax(-1, keepdim=True)) / rows.temperature_R1
        if options is not None:
            scaled_RV = options.drop_unlikely(scaled_RV)
        if rows.filters:
            scaled_RV = _filter(scaled_RV, rows.top_k_R, rows.top_p_R1)
        noise_RV = gumbel(rows.seed_R, positions_R, logits_RV.shape[1])
        drawn_R = (scaled_RV.to(torch.float64) + noise_RV).argmax(-1)
        ids_R = torch.where(rows.drawn_R, drawn_R, ids_R)
    if options is not None:
        options.count(ids_R)
    logprob_RV = logits_RV.log_softmax(-1)
    return ids_R, logprob_RV.gather(1, ids_R[:, None])[:, 0]


def add_top(
    logits_RV: torch.Tensor, ids_R: torch.Tensor, logprob_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the `count` likeliest tokens of the unmodified distribution to each row's chosen one.

    Returns:
        Ids and log-probabilities, 1 + count of each for a row, in one dimension.
    """
    if not count:
        return ids_R, logprob_R
    top = logits_RV.to(torch.float32).log_softmax(-1).topk(min(count, logits_RV.shape[1]))
    both = torch.cat((ids_R[:, None], top.indices), 1), torch.cat((logprob_R[:, None], top.values), 1)
    return both[0].flatten(), both[1].flatten()


def _constrain(logits_RV: torch.Tensor, allowed_RW: torch.Tensor) -> torch.Tensor:
    """Set the logits of tokens that a row may not choose to -inf."""
    bits_32 = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_RV = (allowed_RW[:, :, None] >> bits_32 & 1).flatten(1)[:, : logits_RV.shape[1]]
    return logits_RV.masked_fill(allowed_RV == 0, float("-inf"))


def gumbel(seed_R: torch.Tensor, positions_R: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return standard Gumbel noise [R, V] in float64, hashed by splitmix64's finaliser. Integers wrap."""
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
    """Shift right logically; torch's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _filter(scaled_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Set the tokens that top-k and then top-p drop to -inf. Ties with the last kept token are kept."""
    ordered_RV = scaled_RV.sort(-1, descending=True).values
    rank_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    ordered_RV = ordered_RV.masked_fill(rank_V >= top_k_R[:, None], float("-inf"))
    mass_RV = ordered_RV.softmax(-1).to(torch.float64)
    before_RV = mass_RV.cumsum(-1) - mass_RV
    kept_R1 = (((before_RV < top_p_R1) | (top_p_R1 >= 1)) & (rank_V < top_k_R[:, None])).sum(-1, keepdim=True)
    threshold_R1 = ordered_RV.gather(1, kept_R1.clamp(min=1) - 1)
    return scaled_RV.masked_fill(scaled_RV < threshold_R1, float("-inf"))
