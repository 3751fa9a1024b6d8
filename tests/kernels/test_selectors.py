"""Selector references against brute force in float64, and what every selector keeps to.

Shape suffixes as in `kernels.interface`. Sums of lists of pairs, one tile at a time: slow, and plain to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.kernels.interface import (
    BLOCK,
    AttentionInput,
    KernelInputError,
    StateSpec,
    TileMask,
    no_phase,
)
from deltafront.kernels.selectors.anchors import reference as anchors
from deltafront.kernels.selectors.anchors.selector import AnchorsSelector
from deltafront.kernels.selectors.anchors.table import SideSettings
from deltafront.kernels.selectors.antidiagonal.selector import AntidiagonalSelector
from deltafront.kernels.selectors.block_pool.selector import BlockPoolSelector
from deltafront.kernels.selectors.flex.selector import FlexSelector
from deltafront.kernels.selectors.naive.selector import NaiveSelector
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.kernels.selectors.streaming.selector import StreamingSelector
from deltafront.kernels.selectors.vertical_slash.selector import VerticalSlashSelector
from deltafront.kernels.structured import structured_input
from deltafront.kernels.testing import chunk_of, random_input

OPTIONS = {"tau": 0.8, "cos": 0.75, "q_anchors": 4, "k_anchors": 8, "stride": 8, "sink": 1, "window": 200}
SCORED: dict[str, Callable[[], ScoredSelector]] = {
    "antidiagonal": lambda: AntidiagonalSelector(OPTIONS),
    "naive": lambda: NaiveSelector(OPTIONS),
    "block_pool": lambda: BlockPoolSelector(OPTIONS),
    "anchors": lambda: AnchorsSelector(OPTIONS),
}
CHUNKABLE: dict[str, Callable[[], Any]] = {**SCORED, "streaming": lambda: StreamingSelector(OPTIONS)}


def spec_of(x: AttentionInput) -> StateSpec:
    batch, heads, _, dim = x.q_BHTD.shape
    groups = x.k_BGSD.shape[1]
    return StateSpec(batch, heads, groups, dim, x.prompt_tokens, x.q_BHTD.device, x.q_BHTD.dtype)


def select(selector: Any, x: AttentionInput) -> TileMask:
    mask: TileMask = selector.select(x, selector.new_state(spec_of(x)), no_phase)
    return mask


def tiles(mask: TileMask) -> list[list[int]]:
    columns = mask.index_BHNM.shape[-1]
    index, count = mask.index_BHNM.reshape(-1, columns), mask.count_BHN.reshape(-1)
    return [index[row, : int(count[row])].tolist() for row in range(count.shape[0])]


def sample(tokens: int = 330, **changes: Any) -> AttentionInput:
    settings: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "seed": tokens, **changes}
    return structured_input(tokens, **settings)


def from_logits(
    x: AttentionInput, per_block: int, logit: Callable[[int, int, int, int], float | None]
) -> torch.Tensor:
    """Softmax of logit(batch, head, query group, key group) over the key groups that have one, in tiles."""
    batch, heads = x.q_BHTD.shape[:2]
    score = torch.zeros(batch, heads, x.query_blocks, x.key_blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(x.query_blocks * per_block):
                found = [(j, logit(b, h, i, j)) for j in range(x.key_blocks * per_block)]
                real = [(j, value) for j, value in found if value is not None]
                if not real:
                    continue
                top = max(value for _, value in real)
                total = sum(math.exp(value - top) for _, value in real)
                for j, value in real:
                    score[b, h, i // per_block, j // per_block] += math.exp(value - top) / total
    return score


def antidiagonal_brute_force(x: AttentionInput, stride: int) -> torch.Tensor:
    q, k = x.q_BHTD.double(), x.k_BGSD.double()
    dots = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(x.group, 1)) * x.scale

    def logit(b: int, h: int, i: int, j: int) -> float | None:
        pairs = []
        for u in range(stride):
            row, key = i * stride + u, j * stride + stride - 1 - u
            if row < q.shape[2] and key <= x.q_start + row:
                pairs.append(float(dots[b, h, row, key]))
        return sum(pairs) / len(pairs) if pairs else None

    return from_logits(x, BLOCK // stride, logit)


def naive_brute_force(x: AttentionInput, stride: int) -> torch.Tensor:
    q, k = x.q_BHTD.double(), x.k_BGSD.double()

    def logit(b: int, h: int, i: int, j: int) -> float | None:
        row, key = i * stride, j * stride
        if row >= q.shape[2] or key > x.q_start + row:
            return None
        return float(q[b, h, row] @ k[b, h // x.group, key]) * x.scale

    return from_logits(x, BLOCK // stride, logit)


def pooled_brute_force(x: AttentionInput) -> torch.Tensor:
    q, k = x.q_BHTD.double(), x.k_BGSD.double()

    def logit(b: int, h: int, i: int, j: int) -> float | None:
        if j > i + x.first_block:
            return None
        mean_q = q[b, h, i * BLOCK : (i + 1) * BLOCK].mean(0)
        return float(mean_q @ k[b, h // x.group, j * BLOCK : (j + 1) * BLOCK].mean(0)) * x.scale

    return from_logits(x, 1, logit)


def slots_brute_force(
    rows: torch.Tensor, cos: float, side: SideSettings
) -> list[tuple[int, int, torch.Tensor]]:
    """(first row, rows stood for, vector) of the slots of one block of rows (at most 128, D)."""

    def runs_at(threshold: float) -> list[tuple[int, int]]:
        starts = [0]
        for row in range(1, rows.shape[0]):
            a, b = rows[starts[-1]], rows[row]
            if float(a @ b / (a.norm() * b.norm())) < threshold:
                starts.append(row)
        return list(zip(starts, [*starts[1:], rows.shape[0]], strict=True))

    runs = runs_at(cos)
    if side.relax is not None and len(runs) > side.cap:
        runs = runs_at(cos - side.relax)
    if len(runs) > side.cap:
        picks = [i * len(runs) // side.cap for i in range(side.cap)]
        if side.overflow == "merge":
            ends = [runs[nxt][0] for nxt in picks[1:]] + [rows.shape[0]]
            runs = [(runs[pick][0], end) for pick, end in zip(picks, ends, strict=True)]
        else:
            runs = [runs[pick] for pick in picks]
    return [
        (start, end - start, rows[start] if side.representative == "anchor" else rows[start:end].mean(0))
        for start, end in runs
    ]


def anchors_brute_force(x: AttentionInput, selector: AnchorsSelector) -> torch.Tensor:
    form = selector.form
    batch, heads = x.q_BHTD.shape[:2]
    score = torch.zeros(batch, heads, x.query_blocks, x.key_blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            k = x.k_BGSD[b, h // x.group].double()
            keys = [
                (m, m * BLOCK + first, count, vector)
                for m in range(x.key_blocks)
                for first, count, vector in slots_brute_force(
                    k[m * BLOCK : (m + 1) * BLOCK], form.cos, form.k
                )
            ]
            for n in range(x.query_blocks):
                q = x.q_BHTD[b, h, n * BLOCK : (n + 1) * BLOCK].double()
                cells = []
                for a, (first, _, vector) in enumerate(slots_brute_force(q, form.cos, form.q)):
                    place = x.q_start + n * BLOCK + first
                    for m, start, count, key in keys:
                        seen = min(count, place - start + 1)
                        if seen > 0:
                            weight = seen if form.weighted else 1
                            cells.append((a, m, weight * math.exp(float(vector @ key) * x.scale)))
                for a, m, mass in cells:
                    shared = [c[2] for c in cells if c[0] == a or not form.row_normalised]
                    score[b, h, n, m] += mass / sum(shared)
    return score


def check_scores(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("tokens", [300, 261])
def test_antidiagonal_equals_brute_force(stride: int, tokens: int) -> None:
    x = sample(tokens)
    selector = AntidiagonalSelector({**OPTIONS, "stride": stride})
    check_scores(selector.scores(x, None, no_phase), antidiagonal_brute_force(x, stride))
    tail = chunk_of(x, 256, tokens)
    check_scores(selector.scores(tail, None, no_phase), antidiagonal_brute_force(tail, stride))


def test_naive_and_pooled_equal_brute_force() -> None:
    x = sample(300)
    naive, pooled = NaiveSelector({**OPTIONS, "stride": 16}), BlockPoolSelector(OPTIONS)
    check_scores(naive.scores(x, None, no_phase), naive_brute_force(x, 16))
    check_scores(pooled.scores(x, None, no_phase), pooled_brute_force(x))


FORMS: dict[str, dict[str, Any]] = {
    "ours": {},
    "merged": {"q_overflow": "merge", "k_overflow": "merge", "k_relax": None},
    "thesis": {
        "q_representative": "anchor",
        "k_representative": "anchor",
        "k_relax": None,
        "weighted": False,
        "row_normalised": False,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_anchors_equal_brute_force(form: str) -> None:
    x = sample(300)
    wide = {"q_anchors": 128, "k_anchors": 128} if form == "thesis" else {}
    selector = AnchorsSelector({**OPTIONS, **wide}, **FORMS[form])
    score = selector.scores(x, selector.new_state(spec_of(x)), no_phase)
    check_scores(score, anchors_brute_force(x, selector))


def test_crowded_blocks_are_relaxed_and_only_those() -> None:
    x = sample(256)
    strict = anchors.summarise(x.k_BGSD, 0.75, SideSettings(8, "mean", "drop"))
    relaxed = anchors.summarise(x.k_BGSD, 0.75, SideSettings(8, "mean", "drop", 0.3))
    assert int(relaxed.count_BGMA.sum()) > int(strict.count_BGMA.sum())
    roomy = SideSettings(128, "mean", "drop", 0.3)
    plain = anchors.summarise(x.k_BGSD, 0.75, replace(roomy, relax=None))
    assert torch.equal(anchors.summarise(x.k_BGSD, 0.75, roomy).count_BGMA, plain.count_BGMA)
    assert int(plain.count_BGMA.sum()) == 256


@pytest.mark.parametrize("name", CHUNKABLE)
@pytest.mark.parametrize("step", [128, 384])
def test_chunks_select_what_the_whole_prompt_selects(name: str, step: int) -> None:
    x = sample(897, q_heads=3, batch=2)
    selector = CHUNKABLE[name]()
    whole = select(selector, x)
    state = selector.new_state(spec_of(x))
    for start in range(0, 897, step):
        part = selector.select(chunk_of(x, start, min(start + step, 897)), state, no_phase)
        blocks = part.count_BHN.shape[2]
        first = start // BLOCK
        expected = TileMask(
            whole.index_BHNM[:, :, first : first + blocks], whole.count_BHN[:, :, first : first + blocks]
        )
        assert tiles(part) == tiles(expected)


@pytest.mark.parametrize("name", CHUNKABLE)
def test_keys_after_a_block_never_matter(name: str) -> None:
    x = sample(700)
    selector = CHUNKABLE[name]()
    before = select(selector, x)
    changed = replace(x, k_BGSD=x.k_BGSD.clone())
    changed.k_BGSD[:, :, 384:] = 5 * torch.randn_like(changed.k_BGSD[:, :, 384:])
    after = select(selector, changed)
    first = TileMask(before.index_BHNM[:, :, :3], before.count_BHN[:, :, :3])
    assert tiles(TileMask(after.index_BHNM[:, :, :3], after.count_BHN[:, :, :3])) == tiles(first)


@pytest.mark.parametrize("name", CHUNKABLE)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1)])
def test_query_heads_read_their_key_head(name: str, q_heads: int, kv_heads: int) -> None:
    x = sample(400, q_heads=q_heads, kv_heads=kv_heads)
    group = q_heads // kv_heads
    repeated = replace(
        x, k_BGSD=x.k_BGSD.repeat_interleave(group, 1), v_BGSD=x.v_BGSD.repeat_interleave(group, 1)
    )
    assert tiles(select(CHUNKABLE[name](), x)) == tiles(select(CHUNKABLE[name](), repeated))


@pytest.mark.parametrize("name", SCORED)
def test_full_budget_keeps_every_causal_tile(name: str) -> None:
    x = sample(500)
    selector = SCORED[name]()
    selector.rule = Rule("cumulative", 1.0)
    rows = tiles(select(selector, x))
    assert rows == [list(range(n + 1)) for n in range(4)] * 2


@pytest.mark.parametrize("name", CHUNKABLE)
@pytest.mark.parametrize("kind", ["duplicates", "zeros", "large", "one token"])
def test_degenerate_rows_give_a_valid_mask(name: str, kind: str) -> None:
    x = random_input(513, head_dim=16, rows=1 if kind == "one token" else None)
    factor = {"duplicates": 1.0, "zeros": 0.0, "large": 300.0, "one token": 1.0}[kind]
    q, k = x.q_BHTD * factor, x.k_BGSD * factor
    if kind == "duplicates":
        q, k = q[:, :, :1].expand_as(q).contiguous(), k[:, :, :1].expand_as(k).contiguous()
    x = replace(x, q_BHTD=q, k_BGSD=k)
    for row in range(x.query_blocks):
        for kept in tiles(select(CHUNKABLE[name](), x))[row :: x.query_blocks]:
            diagonal = x.first_block + row
            assert kept == sorted(set(kept)) and {0, diagonal} <= set(kept) and max(kept) == diagonal


def test_streaming_keeps_sink_and_window() -> None:
    x = sample(1000)
    rows = tiles(select(StreamingSelector({"sink": 130, "window": 200}), x))[:8]
    for n, kept in enumerate(rows):
        seen = {key // BLOCK for row in range(n * BLOCK, (n + 1) * BLOCK) for key in window(row, 200)}
        sink = {0, 1} if n else {0}
        assert kept == sorted(seen | sink)


def window(row: int, size: int) -> range:
    return range(max(0, row - size + 1), row + 1)


def test_vertical_slash_keeps_a_planted_column() -> None:
    """Every query looks at key 150, 886 to 949 before the last 64 queries: band 7 of the distances."""
    q, k = torch.zeros(1, 1, 1100, 16), torch.zeros(1, 1, 1100, 16)
    q[..., 8], k[0, 0, 150, 8] = 8.0, 8.0
    x = AttentionInput.of(q, k, torch.zeros_like(k))
    rows = tiles(select(VerticalSlashSelector({"verticals": 1, "slashes": 1}), x))
    for n, kept in enumerate(rows):
        banded = {m for m in (n - 7, n - 8) if m >= 0}
        assert set(kept) == banded | {0, n} | ({1} if n else set())


def test_vertical_slash_keeps_a_planted_diagonal() -> None:
    """Every query looks at the key 300 before it: band 2 of the distances, two tiles of a row."""
    rates = torch.tensor([0.8, 0.49, 0.3, 0.18])
    angle = torch.arange(1100)[:, None] * rates
    q, k = torch.zeros(1, 1, 1100, 16), torch.zeros(1, 1, 1100, 16)
    k[0, 0, :, :8] = 6 * torch.cat([angle.cos(), angle.sin()], -1)
    q[0, 0, :, :8] = 6 * torch.cat([(angle - 300 * rates).cos(), (angle - 300 * rates).sin()], -1)
    x = AttentionInput.of(q, k, torch.zeros_like(k))
    rows = tiles(select(VerticalSlashSelector({"verticals": 1, "slashes": 1}), x))
    columns = set()
    for n, kept in enumerate(rows):
        banded = {m for m in (n - 2, n - 3) if m >= 0}
        assert banded <= set(kept)
        columns |= set(kept) - banded - {0, n}
    assert len(columns) <= 1


def test_flex_budgets_and_patterns() -> None:
    x = sample(1000)
    everything = select(FlexSelector({"gamma_flex": 1.0, "tau_flex": 1.0}), x)
    assert everything.count_BHN[0, 0].tolist() == list(range(1, 9))
    aware = select(FlexSelector({"gamma_flex": 0.6, "tau_flex": 1.0}), x)
    lines = select(FlexSelector({"gamma_flex": 0.6, "tau_flex": 0.0}), x)
    assert tiles(aware) != tiles(lines)
    assert int(aware.count_BHN.sum()) < int(everything.count_BHN.sum())


def test_scores_travel_with_the_mask_where_the_options_ask() -> None:
    x = sample(400)
    selector = AntidiagonalSelector({**OPTIONS, "exact_share": 0.1})
    mask = select(selector, x)
    assert mask.score_BHNM is not None
    score = selector.scores(x, None, no_phase)
    for n in range(4):
        kept = mask.index_BHNM[0, 1, n, : mask.count_BHN[0, 1, n]].long()
        assert torch.equal(mask.score_BHNM[0, 1, n, : kept.numel()], score[0, 1, n, kept])
    assert select(AntidiagonalSelector(OPTIONS), x).score_BHNM is None


def test_bad_input() -> None:
    x = random_input(300, head_dim=16)
    for name, make in CHUNKABLE.items():
        misplaced = random_input(300, head_dim=16, rows=100)
        with pytest.raises(KernelInputError, match="multiple of 128"):
            select(make(), misplaced)
        if name in SCORED:
            with pytest.raises(KernelInputError, match="scale"):
                select(make(), replace(x, scale=-1.0))
    for baseline in (
        VerticalSlashSelector({"verticals": 10, "slashes": 10}),
        FlexSelector({"gamma_flex": 0.9, "tau_flex": 0.1}),
    ):
        with pytest.raises(KernelInputError, match="whole prompt"):
            select(baseline, random_input(300, head_dim=16, prompt_tokens=400))
    selector = AnchorsSelector(OPTIONS)
    small = replace(spec_of(x), max_tokens=256)
    with pytest.raises(KernelInputError, match="state"):
        selector.select(x, selector.new_state(small), no_phase)
    with pytest.raises(KernelInputError, match="state"):
        selector.select(x, selector.new_state(replace(spec_of(x), dtype=torch.float16)), no_phase)
    for values, arguments in (({"q_anchors": 3}, {}), ({}, {"k_representative": "median"})):
        with pytest.raises(KernelInputError):
            AnchorsSelector({**OPTIONS, **values}, **arguments)
    for make in (AntidiagonalSelector, NaiveSelector):
        with pytest.raises(KernelInputError, match="stride"):
            make({**OPTIONS, "stride": 5})
