"""Searches for the Δ-layers with which sparse decode changes answers least.

The search starts from the choices of `delta_layers.py`, because layers with equal losses
(`delta_layers.Calibration`) affect answers very differently. Each document is prefilled densely once. Then
the answer's tokens (rows) run through the layers again, as decode steps would, with the pages that a choice
of Δ-layers selects. Their predictions are compared with those of dense decode.

Shape suffixes also: R rows, J = H / G.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from deltafront.kernels.attention.sinks import with_sinks
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import AttentionInput
from deltafront.workers.calibration.delta_layers import Calibration, choose, selected_pages
from deltafront.workers.calibration.dense_pass import embedded, read_densely
from deltafront.workers.calibration.probes import Document, with_answers
from deltafront.workers.calibration.sensitivity import divergence
from deltafront.workers.model.decoder.stack import LayerStack

ROWS = 96
"""Maximum number of rows of a text that are computed for each choice."""

Layers = tuple[int, ...]


class DecodedRows:
    @torch.inference_mode()
    def __init__(self, stack: LayerStack, text: Document) -> None:
        """Prefill a text densely, and choose at most ROWS of its answers' tokens to decode again. Raises
        ValueError if every answer has fewer than two tokens."""
        ids, answers = with_answers(text)
        later = [row for before, row in pairwise(answers) if row == before + 1]
        if not later:
            raise ValueError("a search for Δ-layers needs questions whose answers have two tokens or more")
        places = torch.linspace(0, len(later) - 1, min(ROWS, len(later))).long().tolist()
        self._stack = stack
        self._rows = [later[place] for place in places]
        self._positions_R = torch.tensor(self._rows, device=stack.device)
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._entering: list[torch.Tensor] = []
        self.tokens = len(ids)

        def record(_layer: int, x: AttentionInput) -> None:
            self._kv.append((x.k_BGSD[0], x.v_BGSD[0]))

        hidden_TC = embedded(stack, ids)
        for layer in stack.layers:
            self._entering.append(hidden_TC[self._rows])
            hidden_TC = read_densely(stack, hidden_TC, record, range(layer, layer + 1))
        self._dense_RC = hidden_TC[self._rows]

    @torch.inference_mode()
    def divergence(self, delta_layers: Layers, dense: Collection[int], budget: int, recency: int) -> float:
        """Return the mean KL divergence of the rows' next-token predictions, from dense to sparse decode.

        The KV of earlier tokens comes from dense prefill.

        Args:
            dense: Layers after the first Δ-layer that attend densely but select no pages.
            budget, recency: K and L of DELTA, in pages.
        """
        first = delta_layers[0]
        selected_RS: torch.Tensor | None = None

        def attend(layer: int, q_RHD: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> torch.Tensor:
            nonlocal selected_RS
            sparse = layer not in delta_layers and layer not in dense
            out_RHD, weights_GJRS = self._attend(layer, q_RHD, k_RGD, v_RGD, selected_RS if sparse else None)
            if layer in delta_layers:
                selected_RP = selected_pages(weights_GJRS.amax((0, 1)), self._positions_R, budget, recency)
                selected_RS = selected_RP.repeat_interleave(PAGE_TOKENS, dim=1)[:, : weights_GJRS.shape[3]]
            return out_RHD

        hidden_RC = self._stack.forward(
            self._entering[first], self._positions_R, attend, range(first, self._stack.layers.stop)
        )
        return float(divergence(self._stack, self._dense_RC, hidden_RC).mean())

    def _attend(
        self,
        layer: int,
        q_RHD: torch.Tensor,
        k_RGD: torch.Tensor,
        v_RGD: torch.Tensor,
        selected_RS: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the text's keys, with each row's own K and V in place of the text's at its position.
        Returns out_RHD, and weights_GJRS without sinks."""
        k_GSD, v_GSD = self._kv[layer]
        rows, heads, dim = q_RHD.shape
        groups = k_GSD.shape[0]
        q_GJRD = q_RHD.transpose(0, 1).reshape(groups, heads // groups, rows, dim)
        logits_GJRS = q_GJRD.float() @ k_GSD.float().transpose(1, 2)[:, None]
        own_GJR = torch.einsum("gjrd,rgd->gjr", q_GJRD.float(), k_RGD.float())
        place_R = self._positions_R
        row_R = torch.arange(rows, device=place_R.device)
        logits_GJRS[..., row_R, place_R] = own_GJR
        future_RS = torch.arange(k_GSD.shape[1], device=place_R.device) > place_R[:, None]
        hidden_RS = future_RS if selected_RS is None else future_RS | ~selected_RS
        if window := self._stack.config.windows.get(layer):
            key_S = torch.arange(k_GSD.shape[1], device=place_R.device)
            hidden_RS = hidden_RS | (key_S <= place_R[:, None] - window)
        logits_GJRS = (logits_GJRS * dim**-0.5).masked_fill_(hidden_RS, float("-inf"))
        weights_GJRS = logits_GJRS.softmax(-1)
        out_GJRD = (weights_GJRS.to(v_GSD.dtype) @ v_GSD[:, None]).float()
        changed_GRD = (v_RGD.transpose(0, 1) - v_GSD[:, place_R]).float()
        out_GJRD += weights_GJRS[..., row_R, place_R][..., None] * changed_GRD[:, None]
        if (sink_H := self._stack.sinks(layer)) is not None:
            sink_GJ1 = sink_H.view(groups, -1, 1)
            out_GJRD = with_sinks(out_GJRD, logits_GJRS.logsumexp(-1), sink_GJ1)
        return out_GJRD.flatten(0, 1).transpose(0, 1).to(q_RHD.dtype), weights_GJRS


def refine(
    stack: LayerStack, texts: Sequence[Document], calibration: Calibration, dense_layers: int, **options: Any
) -> Calibration:
    """Replace the calibration's Δ-layers by those that `search` finds.

    The KV of all texts stays on the device. `dense_layers` does not count layers with sliding windows. Raises
    ValueError if the model has linear attention.
    """
    if stack.config.linear is not None:
        raise ValueError("the search computes single tokens of a text again, which linear attention cannot")
    read, windows = [DecodedRows(stack, text) for text in texts], stack.config.window_layers
    options["full_layers"] = {*options["full_layers"], *windows}  # layers with windows are never sparse
    loss_LL = torch.tensor(calibration.losses, dtype=torch.float64)
    delta_layers, cost = search(read, loss_LL, dense_layers + len(windows), **options)
    return replace(calibration, delta_layers=delta_layers, divergence=cost)


def search(
    texts: Sequence[DecodedRows],
    loss_LL: torch.Tensor,
    dense_layers: int,
    *,
    budget: int,
    recency: int,
    full_layers: Collection[int],
    tell: Callable[[str], None] = lambda _what: None,
) -> tuple[Layers, float]:
    """Search the Δ-layers with the smallest mean divergence, if exactly `dense_layers` layers are dense.

    The dense layers are those before the first Δ-layer, the Δ-layers, and `full_layers` after the first
    Δ-layer. For each possible first Δ-layer, `choose` gives a starting point. From the best starting point, a
    greedy search moves one Δ-layer at a time until no move helps.

    Returns:
        The Δ-layers, and their mean divergence over the texts.
    Raises:
        ValueError: No choice of Δ-layers leaves this number of layers dense.
    """
    layers = loss_LL.shape[0]

    def cost(delta_layers: Layers) -> float:
        if delta_layers not in known:
            parts = [text.divergence(delta_layers, full_layers, budget, recency) for text in texts]
            known[delta_layers] = sum(parts) / len(parts)
        return known[delta_layers]

    known: dict[Layers, float] = {}
    starts = list(_starts(loss_LL, dense_layers, full_layers))
    if not starts:
        raise ValueError(f"no choice of Δ-layers leaves {dense_layers} of {layers} layers dense")
    for start in starts:
        tell(f"Δ-layers {_shown(start)}: divergence {cost(start):.4f}")
    best = min(starts, key=cost)
    improved = True
    while improved:
        improved = False
        for moved in _moves(best, layers, full_layers):
            if cost(moved) < cost(best):
                best, improved = moved, True
        tell(f"Δ-layers {_shown(best)}: divergence {cost(best):.4f} ({len(known)} choices read)")
    return best, cost(best)


def _starts(loss_LL: torch.Tensor, dense_layers: int, full_layers: Collection[int]) -> Iterator[Layers]:
    layers = loss_LL.shape[0]
    for first in range(layers - 1):
        if first in full_layers:
            continue
        after = sum(layer > first for layer in full_layers)
        count = dense_layers - first - after
        free = sum(first < layer < layers - 1 and layer not in full_layers for layer in range(layers))
        if 1 <= count <= free + 1:
            yield choose(loss_LL, count, full_layers, first)


def _moves(delta_layers: Layers, layers: int, full_layers: Collection[int]) -> Iterator[Layers]:
    first, taken = delta_layers[0], set(delta_layers) | set(full_layers)
    for left in delta_layers[1:]:
        for layer in range(first + 1, layers - 1):
            if layer not in taken:
                yield tuple(sorted({*delta_layers, layer} - {left}))


def _shown(delta_layers: Layers) -> str:
    return ",".join(map(str, delta_layers))
