"""Pairs of sampling kernels with temperature, top-k and top-p, over Llama-3.1's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deltafront.benchmarks.beside_flashinfer.pairs import CONFIG, Pair, copies_of
from deltafront.kernels.sampling.sample import SamplingRows, gumbel, sample

VOCAB = 128_256
TEMPERATURE, TOP_K, TOP_P = 0.7, 50, 0.9
_SAMPLES = 2048


def sampling(flashinfer: Any) -> Iterator[Pair]:
    """Pair our sampling with FlashInfer's, and with FlashInfer's filters followed by our random draw. Our
    draw does not depend on a request's row in the batch; FlashInfer's does."""
    for count in (1, 8, 64):
        logits_NRV = torch.stack([_logits(count) for _ in range(copies_of(count * VOCAB * 4))])
        given = logits_NRV, _rows(count)
        own = partial(_sample, *given)
        shape, copies = f"{count} x {VOCAB}", logits_NRV.shape[0]
        theirs = partial(_their_sample, flashinfer, *given)
        yield Pair("sampling", shape, own, theirs, copies, partial(_same_distribution, flashinfer))
        theirs = partial(_their_filters, flashinfer, *given)
        yield Pair("sampling (our draw)", shape, own, theirs, copies, partial(_same_ids, flashinfer))


def _logits(rows: int) -> torch.Tensor:
    """Make logits of a Zipf distribution in random order. The most likely token has probability 0.13."""
    rank_RV = torch.rand(rows, VOCAB, device=CONFIG.device).argsort(-1)
    return (-1.1 * (1.0 + rank_RV).log()).to(CONFIG.dtype)


def _rows(rows: int) -> SamplingRows:
    room = SamplingRows.room(rows, VOCAB, CONFIG.device)
    room.drawn_R.fill_(True)
    room.temperature_R1.fill_(TEMPERATURE)
    room.top_k_R.fill_(TOP_K)
    room.top_p_R1.fill_(TOP_P)
    room.seed_R.copy_(torch.arange(rows))
    return replace(room, draws=True, filters=True)


def _sample(logits_NRV: torch.Tensor, rows: SamplingRows, i: int) -> Sequence[torch.Tensor]:
    return sample(logits_NRV[i], rows, rows.seed_R)


def _their_sample(
    flashinfer: Any, logits_NRV: torch.Tensor, rows: SamplingRows, i: int
) -> Sequence[torch.Tensor]:
    logits_RV = logits_NRV[i].float()
    probs_RV = flashinfer.sampling.softmax(logits_RV, rows.temperature_R1[:, 0])
    limits = rows.top_k_R, rows.top_p_R1[:, 0]
    draw = flashinfer.sampling.top_k_top_p_sampling_from_probs
    return _with_logprobs(logits_RV, draw(probs_RV, *limits, seed=rows.seed_R, offset=rows.seed_R).long())


def _their_filters(
    flashinfer: Any, logits_NRV: torch.Tensor, rows: SamplingRows, i: int
) -> Sequence[torch.Tensor]:
    logits_RV = logits_NRV[i].float()
    probs_RV = flashinfer.sampling.softmax(logits_RV, rows.temperature_R1[:, 0])
    probs_RV = flashinfer.sampling.top_k_renorm_probs(probs_RV, rows.top_k_R)
    probs_RV = flashinfer.sampling.top_p_renorm_probs(probs_RV, rows.top_p_R1[:, 0])
    noise_RV = gumbel(rows.seed_R, rows.seed_R, VOCAB)
    return _with_logprobs(logits_RV, (probs_RV.log().to(torch.float64) + noise_RV).argmax(-1))


def _with_logprobs(logits_RV: torch.Tensor, ids_R: torch.Tensor) -> Sequence[torch.Tensor]:
    return ids_R, logits_RV.log_softmax(-1).gather(1, ids_R[:, None])[:, 0]


def _same_distribution(flashinfer: Any) -> float:
    """Draw many times with our sampling and FlashInfer's. Return the largest difference of frequencies."""
    given = _logits(1).expand(_SAMPLES, VOCAB)[None], _rows(_SAMPLES)
    drawn = _sample(*given, 0)[0], _their_sample(flashinfer, *given, 0)[0]
    ours_V, theirs_V = (torch.bincount(ids_R, minlength=VOCAB) / _SAMPLES for ids_R in drawn)
    difference = float((ours_V - theirs_V).abs().max())
    if difference > 5 * (0.5 / _SAMPLES) ** 0.5:
        raise AssertionError(f"sampling: frequencies differ by {difference}")
    return difference


def _same_ids(flashinfer: Any) -> float:
    """Return the share of rows for which our sampling and FlashInfer's filters with our draw choose different
    tokens. Raises AssertionError above 5%, since only ties at a filter's limit may differ."""
    given = torch.stack([_logits(256)]), _rows(256)
    ours_R, theirs_R = _sample(*given, 0)[0], _their_filters(flashinfer, *given, 0)[0]
    differ = float((ours_R != theirs_R).float().mean())
    if differ > 0.05:
        raise AssertionError(f"sampling: {differ:.1%} of the rows differ")
    return differ
