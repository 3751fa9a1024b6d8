"""What hidden rows predict, a part of them at a time: logits of a whole tail would fill a small machine.

Shape suffixes: T or A rows, C hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deltafront.workers.model.decoder.stack import LayerStack

_ROWS = 512


def predicted(
    stack: LayerStack, hidden_AC: torch.Tensor, next_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp_A (float64) of the tokens next_A after these rows, and best_A, the likeliest ones; on the CPU."""
    logps, bests = [], []
    parts = zip(torch.split(hidden_AC, _ROWS), torch.split(next_A.to(hidden_AC.device), _ROWS), strict=True)
    for rows_AC, gold_A in parts:
        logits_AV = stack.logits(rows_AC)
        logps.append(logits_AV.log_softmax(-1).gather(1, gold_A[:, None])[:, 0].double().cpu())
        bests.append(logits_AV.argmax(-1).cpu())
    return torch.cat(logps), torch.cat(bests)


def perplexity(stack: LayerStack, tail_TC: torch.Tensor, tail: Sequence[int]) -> float:
    """Of the document's last tokens, each given all before it; tail: the ids of the hidden rows' tokens."""
    logp_A, _best_A = predicted(stack, tail_TC[:-1], torch.tensor(tail[1:]))
    return math.exp(-float(logp_A.mean()))
