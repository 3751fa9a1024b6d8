"""Compares layer roles and one decode step's attention with plain loops of DELTA's Algorithm 2."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.tests.numerics import assert_rows_close
from deltafront.workers.decode.decode_attention import (
    BatchRows,
    LayerPlan,
    LayerRole,
    PageSelectionError,
    StepAttention,
    plan_layers,
)
from deltafront.workers.settings import DecodeConfig

D, S, X = LayerRole.DENSE, LayerRole.SCORING, LayerRole.SPARSE
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.4


def test_layers_before_the_first_delta_layer_are_dense() -> None:
    plan = plan_layers(DecodeConfig(full_layers=(0, 5), delta_layers=(3, 6)), 9)
    assert plan.roles == (D, D, D, S, X, D, S, X, X)
    assert plan.sparse_layers == 3 and plan.calibrated
    none = plan_layers(DecodeConfig(), 4)
    assert none.roles == (D,) * 4 and not none.calibrated


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DecodeConfig(delta_layers=(9,)), "delta_layers names layer 9"),
        (DecodeConfig(full_layers=(-1,)), "full_layers names layer -1"),
        (DecodeConfig(full_layers=(0, 3), delta_layers=(3,)), r"\[3\]"),
        (DecodeConfig(page_budget=4, recency=5), "recency: 5"),
    ],
)
def test_refuses_wrong_layer_settings_with_the_key(config: DecodeConfig, words: str) -> None:
    with pytest.raises(PageSelectionError, match=words):
        plan_layers(config, 9)


def test_requests_page_selection_overrides_the_default() -> None:
    plan = plan_layers(DecodeConfig(delta_layers=(3,)), 9)
    assert plan.selects_pages("", "delta") and plan.selects_pages("delta", "full")
    assert not plan.selects_pages("", "full") and not plan.selects_pages("full", "delta")
    with pytest.raises(PageSelectionError, match="unknown"):
        plan.selects_pages("all", "full")
    with pytest.raises(PageSelectionError, match="calibrate"):
        plan_layers(DecodeConfig(), 9).selects_pages("", "delta")


class Step:
    """Random pages of several requests, and DELTA's selection for one of them in plain loops."""

    def __init__(self, lengths: list[int], plan: LayerPlan, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths, self.plan = lengths, plan
        pages = [-(-length // 16) for length in lengths]
        order = torch.randperm(sum(pages) + 3, generator=draw)
        self.table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
        for row, count in enumerate(pages):
            start = sum(pages[:row])
            self.table[row, :count] = order[start : start + count]
        layers, total = len(plan.roles), len(order)
        self.q = torch.randn(layers, len(lengths), HEADS, DIM, generator=draw) * 2
        self.k, self.v = torch.randn(2, layers, total, 16, KV_HEADS, DIM, generator=draw)

    def run(self, delta: list[int], sink_H: torch.Tensor | None = None) -> list[torch.Tensor]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        selects = torch.tensor([row in delta for row in range(len(self.lengths))], dtype=torch.int32)
        step = StepAttention(self.plan, BatchRows(self.table, lengths, selects if delta else None), SCALE)
        return [
            step.attend(layer, self.q[layer], self.k[layer], self.v[layer], sink_H=sink_H)
            for layer in range(len(self.plan.roles))
        ]

    def expected(self, row: int, delta: bool) -> tuple[list[torch.Tensor], int, int]:
        length = self.lengths[row]
        pages = -(-length // 16)
        chosen, outs, attended, held = list(range(pages)), [], 0, 0
        for layer, role in enumerate(self.plan.roles):
            seen = chosen if delta and role is X else list(range(pages))
            attended += len(seen) * (role is X)
            held += pages * (role is X)
            weights, out = self._attention(layer, row, seen)
            outs.append(out)
            if role is S:
                score = weights.amax(0)
                sums = [float(score[16 * page : 16 * page + 16].sum()) for page in range(pages)]
                recent = list(range(max(0, pages - self.plan.recency), pages))
                others = sorted(set(range(pages)) - set(recent), key=lambda page: -sums[page])
                chosen = sorted(others[: self.plan.budget - len(recent)] + recent)
        return outs, attended, held

    def _attention(self, layer: int, row: int, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        where = [(page, slot) for page in pages for slot in range(16) if page * 16 + slot < self.lengths[row]]
        k, v = (
            torch.stack([x[layer, self.table[row, page], slot] for page, slot in where])
            for x in (self.k, self.v)
        )
        group = HEADS // KV_HEADS
        weights, outs = [], []
        for head in range(HEADS):
            weight = (k[:, head // group] @ self.q[layer, row, head] * SCALE).softmax(0)
            weights.append(weight)
            outs.append(weight @ v[:, head // group])
        return torch.stack(weights), torch.stack(outs)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    budget=st.integers(1, 10),
    recency=st.integers(1, 4),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_each_request_selects_its_own_pages_as_delta_defines(
    lengths: list[int], budget: int, recency: int, seed: int, data: st.DataObject
) -> None:
    plan = LayerPlan((D, S, X, D, X, S, X), max(budget, recency), recency)
    delta = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True).map(sorted))
    made = Step(lengths, plan, seed)
    outs = made.run(delta)
    for row in range(len(lengths)):
        wanted, attended, held = made.expected(row, row in delta)
        for layer, out in enumerate(wanted):
            assert_rows_close(outs[layer][row], out)
        assert plan.pages_read(lengths[row], row in delta) == (attended, held)


def test_sinks_scale_outputs_and_select_the_same_pages() -> None:
    made = Step([150, 80], LayerPlan((D, S, X, X), 4, 2), 1)
    made.v[..., 0] = 1.0  # this channel of the output is the share that the sinks leave
    plain, sinks = made.run([0, 1]), torch.tensor([-9.0, 0.0, 3.0, 9.0])
    for with_, without, kept in zip(made.run([0, 1], sinks), plain, shares(made, sinks), strict=True):
        assert_rows_close(with_, without * with_[..., :1])
        if kept is not None:
            assert_rows_close(with_[..., :1], kept)


def shares(made: Step, sink_H: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the share that the sinks leave, by layer; None for sparse layers."""
    found = list[torch.Tensor | None]()
    for layer, role in enumerate(made.plan.roles):
        kept = torch.zeros(len(made.lengths), HEADS, 1)
        for row, length in enumerate(made.lengths):
            pages = made.table[row, : -(-length // 16)].long()
            k_TGD = made.k[layer, pages].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
            power_HT = (torch.einsum("thd,hd->ht", k_TGD, made.q[layer, row]) * SCALE).double().exp()
            kept[row, :, 0] = power_HT.sum(1) / (power_HT.sum(1) + sink_H.double().exp())
        found.append(None if role is X else kept)
    return found


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_page_selection_with_a_budget_of_all_pages_equals_full(lengths: list[int], seed: int) -> None:
    made = Step(lengths, LayerPlan((D, S, X, X, S, X), 7, 2), seed)
    delta = made.run(list(range(len(lengths))))
    full = made.run([])
    for one, other in zip(delta, full, strict=True):
        assert_rows_close(one, other)
