"""Tests the search for Δ-layers: divergences against plain attention, the result against all choices."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from deltafront.tests.numerics import assert_rows_close
from deltafront.workers.calibration.delta_layer_search import DecodedRows, refine, search
from deltafront.workers.calibration.delta_layers import calibrate, selected_pages
from deltafront.workers.calibration.probes import Document, Question
from deltafront.workers.calibration.sensitivity import divergence

BUDGET, RECENCY = 4, 2


def text(seed: int) -> Document:
    draw = random.Random(seed)
    questions = [
        Question(name, tuple(draw.choices(range(199), k=5)), tuple(draw.choices(range(199), k=4)))
        for name in "ab"
    ]
    return Document(draw.choices(range(199), k=150), questions)


def test_selecting_every_page_gives_no_divergence(tiny_stack: Any) -> None:
    rows = DecodedRows(tiny_stack, text(1))
    assert rows.divergence((1,), (), budget=100, recency=8) == pytest.approx(0.0, abs=1e-6)
    assert rows.divergence((1,), (), BUDGET, RECENCY) > 1e-6


def test_divergence_equals_that_of_decode_row_by_row(tiny_stack: Any) -> None:
    """Each row follows a dense prefill and attends to the pages that the Δ-layer selects."""
    made = text(2)
    chosen, dense = (1,), (3,)
    found = DecodedRows(tiny_stack, made).divergence(chosen, dense, BUDGET, RECENCY)
    ids = [*made.ids, *(t for q in made.questions for t in (*q.prompt, *q.gold))]
    first_end = 150 + 9
    rows = [first_end - 4, first_end - 3, first_end - 2, first_end + 5, first_end + 6, first_end + 7]
    sparse = [row_by_row(tiny_stack, ids[: row + 1], chosen, dense) for row in rows]
    full = [row_by_row(tiny_stack, ids[: row + 1], chosen, range(99)) for row in rows]
    expected = divergence(tiny_stack, torch.stack(full), torch.stack(sparse)).mean()
    assert found == pytest.approx(float(expected), rel=1e-3)


def row_by_row(stack: Any, ids: list[int], chosen: tuple[int, ...], dense: Any) -> torch.Tensor:
    """Compute hidden_C of the last id, with plain attention over keys of dense prefill and its own key."""
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kept = torch.ones(1, len(ids)).bool()

    def densely(layer: int, q: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        kv[layer] = k, v = per_query_head(q, *own)
        return plain(q.transpose(0, 1), k, v, torch.ones(len(q), len(q)).tril().bool())[0].transpose(0, 1)

    def sparsely(layer: int, q: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        pairs = zip(kv[layer], per_query_head(q, *own), strict=True)
        k, v = (torch.cat([before[:, :-1], last], 1) for before, last in pairs)
        everything = layer in chosen or layer in dense
        out, weights = plain(q.transpose(0, 1), k, v, torch.ones_like(kept) if everything else kept)
        if layer in chosen:
            pages = selected_pages(weights.amax(0), torch.tensor([len(ids) - 1]), BUDGET, RECENCY)
            kept = pages.repeat_interleave(16, 1)[:, : len(ids)]
        return out.transpose(0, 1)

    embedded, positions = stack.embed(torch.tensor(ids)), torch.arange(len(ids))
    stack.forward(embedded, positions, densely)
    hidden: torch.Tensor = stack.forward(embedded[-1:], positions[-1:], sparsely)
    return hidden[0]


def per_query_head(q: torch.Tensor, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in own)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights @ v, weights


@pytest.mark.parametrize("dense_layers", [2, 3, 4])
def test_delta_layer_search_finds_a_local_optimum(tiny_stack: Any, dense_layers: int) -> None:
    texts = [DecodedRows(tiny_stack, text(seed)) for seed in (3, 4)]
    layers = len(tiny_stack.layers)
    loss = torch.rand(layers, layers, generator=torch.Generator().manual_seed(5)).double()
    found, cost = search(texts, loss, dense_layers, budget=BUDGET, recency=RECENCY, full_layers=())

    def mean(chosen: tuple[int, ...]) -> float:
        return sum(one.divergence(chosen, (), BUDGET, RECENCY) for one in texts) / 2

    assert found[0] + len(found) == dense_layers and found[-1] < layers - 1
    assert cost == pytest.approx(mean(found))
    same_size = itertools.combinations(range(found[0] + 1, layers - 1), len(found) - 1)
    near = [(found[0], *rest) for rest in same_size if len({*rest} - {*found}) <= 1]
    assert cost <= min(map(mean, near)) + 1e-9


def test_calibrate_replaces_the_delta_layers_by_searched_ones(tiny_stack: Any) -> None:
    texts, told = [text(6)], list[str]()
    found = calibrate(tiny_stack, texts, 1, budget=BUDGET, recency=RECENCY, full_layers=())
    better = refine(
        tiny_stack, texts, found, 3, budget=BUDGET, recency=RECENCY, full_layers=(), tell=told.append
    )
    assert better.losses == found.losses and better.divergence is not None
    assert better.delta_layers[0] + len(better.delta_layers) == 3
    assert told and "divergence" in told[0]


def test_refuses_documents_without_answers_of_two_tokens(tiny_stack: Any) -> None:
    """An answer's first token is predicted in prefill, so decode needs a second one."""
    ids = random.Random(7).choices(range(199), k=150)
    with pytest.raises(ValueError, match="answers have two tokens"):
        DecodedRows(tiny_stack, Document(ids, [Question("a", (1, 2), (3,))]))
    with pytest.raises(ValueError, match="answers have two tokens"):
        DecodedRows(tiny_stack, Document(ids, []))


def test_refuses_impossible_numbers_of_dense_layers(tiny_stack: Any) -> None:
    rows = [DecodedRows(tiny_stack, text(8))]
    loss = torch.zeros(4, 4, dtype=torch.float64)
    for dense_layers in (0, 9):
        with pytest.raises(ValueError, match=f"leaves {dense_layers} of 4 layers dense"):
            search(rows, loss, dense_layers, budget=BUDGET, recency=RECENCY, full_layers=())


def test_selects_the_recent_pages_and_the_best_scored_ones(tiny_stack: Any) -> None:
    """Recent pages end with the query's page."""
    scores = torch.tensor([[5.0, 1.0, 4.0, 0.0, 0.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    found = selected_pages(scores.repeat_interleave(16, 1) / 16, torch.tensor([70, 95]), 3, 1)
    assert_rows_close(found.float(), torch.tensor([[1.0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]]))
