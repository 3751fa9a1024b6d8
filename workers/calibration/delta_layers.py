"""Chooses Δ-layers: the layers whose selected pages fit the sparse layers after them best.

A sparse layer attends only to the pages that the last Δ-layer selected, and loses the attention to other
pages. One dense prefill gives the page scores of all layers, and so each layer's loss for each
possible Δ-layer before it. Dynamic programming minimises the sum of losses. If a text has answers, only their
queries count, because layers chosen on plain text miss facts to be retrieved. DELTA's own criterion, the
largest 1 - cos between attention maps, misses them too (on SmolLM2).

Shape suffixes also: L twice (selecting layer, attending layer), Q queries, J = H / G.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import AttentionInput
from deltafront.workers.calibration.dense_pass import embedded, read_densely
from deltafront.workers.calibration.probes import Document, with_answers
from deltafront.workers.model.decoder.stack import LayerStack

QUERIES = 64
"""Maximum number of queries of a text whose attention is compared."""


@dataclass(frozen=True)
class Calibration:
    """The chosen Δ-layers.

    Attributes:
        losses: losses[a][b] is the mean page score that layer b loses if layer a selects its pages, compared
            with b's own best pages.
        tokens: Number of tokens of each text.
        divergence: Mean KL divergence of answers decoded with these layers; None: not measured.
    """

    delta_layers: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...]
    divergence: float | None = None


def calibrate(
    stack: LayerStack,
    texts: Sequence[Document],
    count: int,
    *,
    budget: int = 64,
    recency: int = 8,
    full_layers: Collection[int] = (0, 1),
) -> Calibration:
    """Choose `count` Δ-layers. Prefills each text with its questions and answers once, densely.

    Args:
        budget, recency: K and L of DELTA, in pages. Use texts of at least four times the budget.

    Raises:
        ValueError: A text is too short or too long, or arguments contradict one another.
    """
    if not 0 < recency < budget:
        raise ValueError(f"recency {recency} must be positive and less than the budget of {budget} pages")
    read, positions = [with_answers(text) for text in texts], stack.config.positions
    if (longest := max(len(ids) for ids, _answers in read)) > positions:
        raise ValueError(f"{longest} tokens are more than the model's {positions} positions")
    each = []
    for ids, answers in read:
        places = query_positions(len(ids), answers)
        each.append(losses(attention_maps(stack, ids, places), places, budget, recency))
    mean_LL = torch.stack(each).mean(0)
    table = tuple(tuple(row) for row in mean_LL.tolist())
    dense = {*full_layers, *stack.config.exact_layers}
    return Calibration(choose(mean_LL, count, dense), table, tuple(len(ids) for ids, _answers in read))


def shortest_text(budget: int) -> int:
    """Return the minimum text length in tokens for a budget in pages."""
    return max(2 * QUERIES, 2 * (budget * PAGE_TOKENS + 1))


def query_positions(tokens: int, answers: Sequence[int]) -> list[int]:
    """Choose at most QUERIES positions, evenly spaced over the answers, or over the second half of a text
    without answers. Raises ValueError if the text is too short."""
    if not answers and tokens < 2 * QUERIES:
        raise ValueError(f"{tokens} tokens are too few to calibrate on: give at least {2 * QUERIES}")
    among = answers or range(tokens // 2, tokens)
    places = torch.linspace(0, len(among) - 1, min(QUERIES, len(among))).long().tolist()
    return [among[place] for place in places]


def attention_maps(stack: LayerStack, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Return each layer's DELTA token scores of the queries at `positions`: maps_LQS, float32, on the CPU.
    Layers with linear attention have zeros."""
    maps = torch.zeros(stack.config.layers, len(positions), len(ids))
    positions_Q = torch.tensor(positions, device=stack.device)
    future_QS = torch.arange(len(ids), device=stack.device) > positions_Q[:, None]

    def hook(layer: int, x: AttentionInput) -> None:
        q_GJQD = x.q_BHTD[0, :, positions_Q].float().view(-1, x.group, len(positions_Q), x.q_BHTD.shape[3])
        logits_GJQS = q_GJQD @ x.k_BGSD[0].float().transpose(1, 2)[:, None] * x.scale
        weights_GJQS = logits_GJQS.masked_fill(future_QS, float("-inf")).softmax(-1)
        maps[layer] = weights_GJQS.amax((0, 1)).cpu()

    read_densely(stack, embedded(stack, ids), hook)
    return maps


def losses(maps_LQS: torch.Tensor, positions: Sequence[int], budget: int, recency: int) -> torch.Tensor:
    """Return loss_LL[a, b] (see `Calibration`). Raises ValueError if the budget covers all pages."""
    positions_Q = torch.tensor(positions)
    tokens = maps_LQS.shape[2]
    if tokens // 2 <= budget * PAGE_TOKENS:
        raise ValueError(
            f"{tokens} tokens are too few for a budget of {budget} pages: give four times as many"
        )
    selected_LQP = selected_pages(maps_LQS, positions_Q, budget, recency).double()
    score_LQP = _page_scores(maps_LQS)
    found_LL = torch.einsum("aqp,bqp->ab", selected_LQP, score_LQP) / len(positions_Q)
    return (found_LL.diagonal() - found_LL).clamp(min=0.0)


def selected_pages(
    map_XQS: torch.Tensor, positions_Q: torch.Tensor, budget: int, recency: int
) -> torch.Tensor:
    """Return bool_XQP: the `budget` pages that each query selects (DELTA, Algorithm 2). These are the last
    `recency` pages, up to the query's own, and the remaining pages with the best scores. X: any
    dimensions."""
    score_XQP = _page_scores(map_XQS)
    page_P = torch.arange(score_XQP.shape[-1], device=map_XQS.device)
    last_Q1 = positions_Q[:, None] // PAGE_TOKENS
    recent_QP = (page_P > last_Q1 - recency) & (page_P <= last_Q1)
    rivals_XQP = score_XQP.masked_fill(recent_QP | (page_P > last_Q1), -1.0)
    best_XQK = rivals_XQP.topk(min(budget - recency, len(page_P)), dim=-1).indices
    return recent_QP.expand(score_XQP.shape).scatter(-1, best_XQK, True)


def _page_scores(map_XQS: torch.Tensor) -> torch.Tensor:
    padded_XQS = torch.nn.functional.pad(map_XQS, (0, -map_XQS.shape[-1] % PAGE_TOKENS))
    return padded_XQS.view(*padded_XQS.shape[:-1], -1, PAGE_TOKENS).sum(-1).double()


def choose(
    loss_LL: torch.Tensor, count: int, full_layers: Collection[int], first: int | None = None
) -> tuple[int, ...]:
    """Choose the `count` Δ-layers with the smallest sum of losses of the sparse layers after them.

    Layers before the first Δ-layer are dense, so the first Δ-layer must be `first`, or lie in the first
    quarter of the candidates. The last layer is never chosen, since no layer follows that could use its
    selection.
    """
    layers = loss_LL.shape[0]
    candidates = [layer for layer in range(layers - 1) if layer not in full_layers]
    if not 1 <= count <= len(candidates):
        raise ValueError(f"{count} Δ-layers cannot be chosen among {len(candidates)} layers")
    sparse_L = torch.tensor([layer not in full_layers for layer in range(layers)])
    until_LL = torch.cumsum((loss_LL * sparse_L).triu(1), dim=1).tolist()
    # plans[layer]: the smallest loss with n Δ-layers of which `layer` is the first, and these Δ-layers.
    plans: dict[int, tuple[float, tuple[int, ...]]] = {
        layer: (until_LL[layer][-1], (layer,)) for layer in candidates
    }
    for _ in range(count - 1):
        plans = {
            layer: min((until_LL[layer][later - 1] + loss, (layer, *rest)) for later, (loss, rest) in after)
            for layer in candidates
            if (after := [(later, plan) for later, plan in plans.items() if later > layer])
        }
    if first is not None:
        return plans[first][1]
    limit = candidates[len(candidates) // 4]
    return min(plan for layer, plan in plans.items() if layer <= limit)[1]
