"""Measures how much sparse attention in each layer changes predictions. One layer at a time is sparse.

The results weight the heads' errors (`curves.py`), because layers differ much: in SmolLM2-135M, two of 30
layers cause more than half of the divergence.

Shape suffixes also: R rows.
"""

from dataclasses import dataclass

import torch

from deltafront.kernels.build import build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import Attention, AttentionInput
from deltafront.kernels.methods import method_spec
from deltafront.workers.calibration.dense_pass import attended, embedded, read_densely
from deltafront.workers.calibration.probes import Document, with_answers
from deltafront.workers.model.decoder.stack import LayerStack

TAIL = 2048
"""Number of last positions of a document whose predictions are compared."""

_ROWS = 256


@dataclass(frozen=True)
class LayerCosts:
    """The mean KL divergence of next-token predictions if one layer is sparse, for each layer without a
    sliding window (float64, CPU).

    `tail_L` is the mean over the document's tail, `answer_L` over the answers' tokens.
    """

    tail_L: torch.Tensor
    answer_L: torch.Tensor


@torch.inference_mode()
def layer_costs(stack: LayerStack, probe: Document, method: Attention) -> LayerCosts:
    """Measure the cost of sparse prefill of the document in each layer. Questions and answers are prefilled
    densely."""
    ids, answers = with_answers(probe)
    tokens = len(probe.ids)

    def sparse(layer: int, x: AttentionInput) -> torch.Tensor:
        read_BHTD = attended(method, _rows(x, 0, tokens), layer)
        if tokens == len(ids):
            return read_BHTD
        block = tokens // BLOCK * BLOCK
        asked_BHTD = attended(build(method_spec("dense")), _rows(x, block, len(ids)), layer)
        return torch.cat([read_BHTD, asked_BHTD[:, :, tokens - block :]], dim=2)

    def dense(_layer: int, _x: AttentionInput) -> None:
        return None

    dense_TC, changed = embedded(stack, ids), list[torch.Tensor]()
    rows = [*range(max(0, tokens - TAIL), tokens), *answers]
    for layer in stack.layers:
        this, others = range(layer, layer + 1), range(layer + 1, stack.layers.stop)
        if layer not in stack.config.exact_layers:
            after_TC = read_densely(stack, dense_TC, sparse, this)
            changed.append(read_densely(stack, after_TC, dense, others)[rows])
        dense_TC = read_densely(stack, dense_TC, dense, this)
    kl_LR = torch.stack([divergence(stack, dense_TC[rows], sparse_RC) for sparse_RC in changed])
    tail = len(rows) - len(answers)
    return LayerCosts(kl_LR[:, :tail].mean(1), kl_LR[:, tail:].sum(1) / max(1, len(answers)))


def divergence(stack: LayerStack, dense_TC: torch.Tensor, method_TC: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of each row's next-token prediction: kl_T (float64, CPU).

    Rows are processed in parts, because the logits of all rows take too much memory. Log-probabilities are
    float64, since rounding in float32 would be a thousandth of a layer's cost.
    """
    parts = []
    for dense_AC, method_AC in zip(torch.split(dense_TC, _ROWS), torch.split(method_TC, _ROWS), strict=True):
        dense_AV, method_AV = (
            stack.logits(rows_AC).log_softmax(-1, dtype=torch.float64) for rows_AC in (dense_AC, method_AC)
        )
        parts.append((dense_AV.exp() * (dense_AV - method_AV)).sum(-1).cpu())
    return torch.cat(parts)


def _rows(x: AttentionInput, first: int, last: int) -> AttentionInput:
    q_BHTD = x.q_BHTD[:, :, first:last]
    k_BGSD, v_BGSD = x.k_BGSD[:, :, :last], x.v_BGSD[:, :, :last]
    return AttentionInput.of(q_BHTD, k_BGSD, v_BGSD, q_start=first, sink_H=x.sink_H)
