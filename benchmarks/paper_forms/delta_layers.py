"""Chooses Δ-layers by DELTA's criterion (sections 5.1, D): where attention shifts most from layer to layer.

    python -m deltafront.benchmarks.paper_forms.delta_layers --text FILE [FILE …] --tokens 8192 --layers 3
    python -m deltafront.benchmarks.accuracy --decode LAYERS:64:8 periodic:3:64:8 random:3:SEED:64:8 …

A layer's shift is 1 - cos between its attention weights and those of the layer before, with all heads
concatenated, for the queries that predict answers' tokens. Layer 2 is the first Δ-layer. The paper takes
layers with large shifts that are "well distributed across the network depth", without a rule. Here later
layers are cut into equal parts, and the layer with the largest shift of each part is chosen.

Shape suffixes are those of `kernels.interface`; L layers, Q queries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from deltafront.benchmarks.paper_forms.levels import documents_of, model_of, model_parser_of
from deltafront.kernels.interface import AttentionInput
from deltafront.workers.calibration.delta_layers import query_positions
from deltafront.workers.calibration.dense_pass import embedded, read_densely
from deltafront.workers.calibration.probes import with_answers
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack

FIRST = 2
"""The first Δ-layer in every model of the paper. The layers before it have full attention."""


@torch.inference_mode()
def attention_shifts(stack: LayerStack, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Compute float64 shift_L in a dense pass over a text. Layer 0 has shift 0."""
    shifts: list[torch.Tensor] = []
    before_QHS: list[torch.Tensor] = []
    positions_Q = torch.tensor(positions, device=stack.device)

    def hook(_layer: int, x: AttentionInput) -> None:
        k_HSD = x.k_BGSD[0].float().repeat_interleave(x.group, dim=0)
        logit_QHS = torch.einsum("hqd,hsd->qhs", x.q_BHTD[0, :, positions_Q].float(), k_HSD) * x.scale
        future_Q1S = torch.arange(len(ids), device=stack.device) > positions_Q[:, None, None]
        map_QX = logit_QHS.masked_fill(future_Q1S, -torch.inf).softmax(-1).flatten(1)
        if before_QHS:
            same_Q = torch.nn.functional.cosine_similarity(before_QHS.pop(), map_QX, dim=1)
            shifts.append(1 - same_Q.double().mean().cpu())
        before_QHS.append(map_QX)

    read_densely(stack, embedded(stack, ids), hook)
    return torch.stack([torch.zeros((), dtype=torch.float64), *shifts])


def shifted_layers(shift_L: Sequence[float], count: int) -> tuple[int, ...]:
    """Choose layer 2, and the layer with the largest shift in each of `count` - 1 equal parts of the layers
    after it. The last layer is never chosen, since no layer follows that would use its pages. Raises
    ValueError."""
    parts = _parts(len(shift_L), count)
    return FIRST, *(max(part, key=lambda layer: (shift_L[layer], -layer)) for part in parts)


def periodic_layers(layers: int, count: int) -> tuple[int, ...]:
    """Choose the first layer of each of `count` equal parts of the layers from 2 on. Raises ValueError."""
    _parts(layers, count)
    return tuple(FIRST + n * (layers - 1 - FIRST) // count for n in range(count))


def random_layers(layers: int, count: int, seed: int) -> tuple[int, ...]:
    """Choose layer 2 and `count` - 1 random layers. Raises ValueError."""
    _parts(layers, count)
    others = random.Random(seed).sample(range(FIRST + 1, layers - 1), count - 1)
    return FIRST, *sorted(others)


def _parts(layers: int, count: int) -> list[range]:
    """Cut layers FIRST + 1 to layers - 2 into `count` - 1 equal parts. Raises ValueError for a bad count."""
    later = layers - 1 - (FIRST + 1)
    if not 1 <= count <= later + 1:
        raise ValueError(f"{count} Δ-layers: a model of {layers} layers has 1 to {later + 1}")
    edges = [FIRST + 1 + n * later // max(1, count - 1) for n in range(count)]
    return [range(a, b) for a, b in pairwise(edges)]


def main(given: Sequence[str] | None = None) -> None:
    parser = model_parser_of(__doc__ or "")
    parser.add_argument("--layers", type=int, nargs="+", default=[3], help="how many Δ-layers")
    arguments = parser.parse_args(given)
    stack, each = load_model(model_of(arguments), arguments.device), []
    for document in documents_of(arguments):
        ids, answers = with_answers(document)
        each.append(attention_shifts(stack, ids, query_positions(len(ids), answers)))
    shift_L = torch.stack(each).mean(0).tolist()
    print("1 - cos from the layer before: " + ", ".join(f"{n} {s:.3f}" for n, s in enumerate(shift_L) if n))
    for count in arguments.layers:
        print(f"{count} Δ-layers: {','.join(map(str, shifted_layers(shift_L, count)))}")


if __name__ == "__main__":
    main()
