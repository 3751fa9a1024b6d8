"""Learns from finished batches how many seconds a prefill group takes per batch, per token, and per pair of
query and key. Pure.

It is a recursive least-squares fit of a batch's seconds per token. Old batches are forgotten, errors are
relative to the geometric mean of prediction and measurement, so that one slow batch weighs little, and no
coefficient is negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deltafront.workers.messages.states import PrefillCost

_KEPT = 0.97
"""The weight of earlier batches beside a new one."""
_OUTLIER = 0.5
"""A batch that is off by more than this share of its prediction counts as if it were off by this: a compiling
kernel makes one batch slow."""
_SURE = 8
"""Number of first batches that are never treated as outliers."""
_SWEEPS = 20
_ORDER = (1, 2, 0)
"""Which coefficient takes first what several could explain: tokens, pairs, batches. From chunks of one length
alone a shorter prompt is so predicted to take less."""
_SCALES = (256.0, 1.0, 1 / 32_768)
"""Units for the seconds per batch, token and pair, so that the three terms are alike in size."""


class CostFit:
    """Learns the cost of one attention method. `chunk_tokens` is the length of the group's chunks."""

    def __init__(self, chunk_tokens: int | None = None) -> None:
        self._chunk_tokens = chunk_tokens
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._parts = [0.0] * 3
        self._batches = 0

    @property
    def cost(self) -> PrefillCost:
        chunk, token, pair = (part * scale for part, scale in zip(self._parts, _SCALES, strict=True))
        return PrefillCost(chunk_s=chunk, token_s=token, pair_s=pair, chunk_tokens=self._chunk_tokens)

    def record_batch(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record that the group worked `seconds` on a batch of chunks, each given by its start and tokens."""
        tokens = sum(count for _, count in chunks)
        found, pairs = seconds / tokens, sum(count * (start + count / 2) for start, count in chunks)
        features = (_SCALES[0] / tokens, 1.0, _SCALES[2] * pairs / tokens)
        expected = sum(part * one for part, one in zip(self._parts, features, strict=True))
        if self._batches >= _SURE:
            found = min(max(found, expected * (1 - _OUTLIER)), expected * (1 + _OUTLIER))
        weight = 1 / ((expected or found) * found or math.inf)
        self._batches += 1
        for n, one in enumerate(features):
            self._products[n] = _KEPT * self._products[n] + weight * one * found
            for m, other in enumerate(features):
                self._moments[n][m] = _KEPT * self._moments[n][m] + weight * one * other
        self._solve()

    def _solve(self) -> None:
        """Find the best coefficients that are not negative, by coordinate descent."""
        for _ in range(_SWEEPS):
            for n in _ORDER:
                others = sum(self._moments[n][m] * self._parts[m] for m in range(3) if m != n)
                if self._moments[n][n]:
                    self._parts[n] = max(0.0, (self._products[n] - others) / self._moments[n][n])
