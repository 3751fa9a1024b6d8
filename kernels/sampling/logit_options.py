"""Options that change a request's logits before its next token is chosen, as in vLLM: bias, penalties,
min_tokens and min_p.

Shape suffixes: R requests, K requests with such options, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogitOptions:
    """The options of a batch, with rows only for requests that have any.

    Attributes:
        rows_K: Each request's row in the batch.
        counts_KV: Number of times each token occurs in the answer so far. The tensor stays on the device.
        prompt_KV: True for tokens of the prompt.
        bias_KV: Added to the logits.
        stops_KV: True for tokens that end the answer. These tokens are forbidden at positions before
            `first_stop_K`.
        floor_K1: Logarithm of min_p: minimum of a token's logit relative to the largest logit.
    """

    rows_K: torch.Tensor
    counts_KV: torch.Tensor
    prompt_KV: torch.Tensor
    bias_KV: torch.Tensor
    stops_KV: torch.Tensor
    first_stop_K: torch.Tensor
    repetition_K1: torch.Tensor
    frequency_K1: torch.Tensor
    presence_K1: torch.Tensor
    floor_K1: torch.Tensor

    def change(self, logits_RV: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Return the logits with bias, penalties and min_tokens applied. positions_R: Positions of the tokens
        to choose.

        A forbidden end token gets the lowest finite logit, so that it is chosen if a grammar allows no other.
        """
        logits_KV = logits_RV[self.rows_K] + self.bias_KV
        came_KV = self.counts_KV > 0
        scale_KV = torch.where(logits_KV > 0, 1 / self.repetition_K1, self.repetition_K1)
        logits_KV = torch.where(came_KV | self.prompt_KV, logits_KV * scale_KV, logits_KV)
        logits_KV = logits_KV - self.frequency_K1 * self.counts_KV - self.presence_K1 * came_KV
        early_K = positions_R[self.rows_K] < self.first_stop_K
        least = torch.finfo(logits_KV.dtype).min
        logits_KV = logits_KV.masked_fill(self.stops_KV & early_K[:, None], least)
        return logits_RV.index_copy(0, self.rows_K, logits_KV)

    def drop_unlikely(self, scaled_RV: torch.Tensor) -> torch.Tensor:
        """Apply min_p to logits that are divided by temperature and whose largest is 0."""
        scaled_KV = scaled_RV[self.rows_K]
        scaled_KV = scaled_KV.masked_fill(scaled_KV < self.floor_K1, float("-inf"))
        return scaled_RV.index_copy(0, self.rows_K, scaled_KV)

    def count(self, ids_R: torch.Tensor) -> None:
        """Add each request's chosen token to its token counts, which the penalties use."""
        ids_K1 = ids_R[self.rows_K][:, None]
        self.counts_KV.scatter_add_(1, ids_K1, torch.ones_like(ids_K1, dtype=self.counts_KV.dtype))
