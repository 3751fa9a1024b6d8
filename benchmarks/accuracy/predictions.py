"""Computes log-probabilities of next tokens from hidden rows, in parts, because all logits would not fit
memory.

Shape suffixes: T or A rows, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.model.decoder.stack import LayerStack

_ROWS = 512
GAIN, LIKELY = 2.0, -2.0
"""A token is a key token if the long context adds at least GAIN to its log-probability and makes it at least
LIKELY: α and β of LongPPL (Fang et al. 2025), equation 5."""


def predicted(
    stack: LayerStack, hidden_AC: torch.Tensor, next_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CPU tensors: float64 logp_A of next_A, the tokens after these rows, and the likeliest tokens."""
    logps, bests = [], []
    parts = zip(torch.split(hidden_AC, _ROWS), torch.split(next_A.to(hidden_AC.device), _ROWS), strict=True)
    for rows_AC, gold_A in parts:
        logits_AV = stack.logits(rows_AC)
        logps.append(logits_AV.log_softmax(-1).gather(1, gold_A[:, None])[:, 0].double().cpu())
        bests.append(logits_AV.argmax(-1).cpu())
    return torch.cat(logps), torch.cat(bests)


def tail_logps(stack: LayerStack, tail_TC: torch.Tensor, tail: Sequence[int]) -> torch.Tensor:
    """Return logp_A (float64) of the tokens of `tail` after the first, each given all tokens before it.

    Args:
        tail: Token ids of the hidden rows, the end of a document.
    """
    return predicted(stack, tail_TC[:-1], torch.tensor(tail[1:]))[0]


def short_logps(reader: Reader, ids: Sequence[int], tail: int, context: int, chunk: int) -> torch.Tensor:
    """Compute `tail_logps` of tokens that see only `context` to 2 · `context` tokens before them. The call
    replaces the document that the reader holds."""
    parts, first = [], len(ids) - tail
    for part in range(first, len(ids), context):
        end = min(part + context, len(ids))
        # A row predicts the next token, so this part also needs the row before its first token.
        begin = max(part - 1, first)
        reading = reader.read(ids[max(0, begin - context) : end], "dense", chunk, end - begin)
        parts.append(tail_logps(reader.stack, reading.tail_TC, ids[begin:end]))
    return torch.cat(parts)


def key_tokens(long_A: torch.Tensor, short_A: torch.Tensor) -> torch.Tensor:
    """Return key_A: the tokens that dense attention predicts from distant context.

    long_A, short_A: Log-probabilities with the whole context and with a short one.
    """
    return (long_A - short_A > GAIN) & (long_A > LIKELY)
