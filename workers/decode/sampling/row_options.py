"""Uploads the options of rows that change logits. Suffixes as in `kernels.sampling.logit_options`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltafront.kernels.sampling.logit_options import LogitOptions
from deltafront.workers.messages.requests import Sampling


@dataclass(frozen=True)
class AnswerSoFar:
    """The tokens before the next sampled one, for options that depend on them, such as penalties.

    Attributes:
        prompt_ids: The distinct tokens of the prompt (little-endian uint32); empty without a repetition
            penalty.
        answer_ids: The answer's tokens so far, including those streamed before a worker failed. Each sampled
            token is appended.
        start: Position of the answer's first token.
        stop_ids: Tokens that may end the answer.
    """

    prompt_ids: bytes
    answer_ids: array[int]
    start: int
    stop_ids: Sequence[int]


def logit_options(
    rows: Sequence[tuple[Sampling, AnswerSoFar | None]], vocab: int, device: torch.device
) -> LogitOptions | None:
    """Upload the logit options of a batch's rows. Returns None if no row has any."""
    given = [(index, *row) for index, row in enumerate(rows) if row[1] is not None]
    if not given:
        return None
    samplings = [sampling for _, sampling, _ in given]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device)[:, None]

    made = LogitOptions(
        rows_K=torch.tensor([index for index, _, _ in given], device=device),
        counts_KV=torch.zeros(len(given), vocab, dtype=torch.int32, device=device),
        prompt_KV=torch.zeros(len(given), vocab, dtype=torch.bool, device=device),
        bias_KV=torch.zeros(len(given), vocab, device=device),
        stops_KV=torch.zeros(len(given), vocab, dtype=torch.bool, device=device),
        first_stop_K=torch.tensor(
            [so_far.start + s.min_tokens for _, s, so_far in given if so_far], device=device
        ),
        repetition_K1=column([s.repetition_penalty for s in samplings]),
        frequency_K1=column([s.frequency_penalty for s in samplings]),
        presence_K1=column([s.presence_penalty for s in samplings]),
        floor_K1=column([math.log(s.min_p) if s.min_p else -math.inf for s in samplings]),
    )
    for k, (_, sampling, so_far) in enumerate(given):
        assert so_far is not None
        _write(made, k, sampling, so_far, vocab)
    return made


def _write(made: LogitOptions, k: int, sampling: Sampling, so_far: AnswerSoFar, vocab: int) -> None:
    device = made.counts_KV.device
    answer_T = torch.from_numpy(np.array(so_far.answer_ids, dtype=np.int64)).to(device)
    made.counts_KV[k].scatter_add_(0, answer_T, torch.ones_like(answer_T, dtype=torch.int32))
    prompt_T = torch.from_numpy(np.frombuffer(so_far.prompt_ids, dtype="<u4").astype(np.int64))
    made.prompt_KV[k, prompt_T.to(device)] = True
    biased_T = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=device)
    made.bias_KV[k, biased_T] = torch.tensor(
        list(sampling.logit_bias.values()), dtype=torch.float32, device=device
    )
    stop_ids = [token for token in so_far.stop_ids if token < vocab]
    made.stops_KV[k, torch.tensor(stop_ids, dtype=torch.int64, device=device)] = True
