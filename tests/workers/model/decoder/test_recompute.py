"""Tests choosing blocks for a question, and recomputing them, against loops and dense prefill."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.layers.rope import KVRows
from deltafront.workers.model.decoder.collectives import Collectives
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.recompute import (
    QUESTION_ROWS,
    BlockAttention,
    BlockQueries,
    rows_of_blocks,
)
from deltafront.workers.model.decoder.stack import AttentionCalls, LayerStack
from deltafront.workers.settings import ModelSpec
from tests.workers.tiny_model import make_tiny_model

TOKENS = 5 * BLOCK


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_chooses_blocks_to_recompute_by_the_mean_over_layers(count: int) -> None:
    torch.manual_seed(count)
    tokens, looks, masses = 6 * BLOCK + 5, BlockAttention(6 * BLOCK + 5), [0.0] * 7
    for _ in range(4):
        q_THD, k_GSD = 3 * torch.randn(QUESTION_ROWS + 2, 4, 16), torch.randn(2, tokens + 9, 16)
        looks.add(q_THD, k_GSD)
        shares_THS = torch.stack(
            [
                torch.stack([(k_GSD[h // 2, :tokens] @ q_THD[t, h] / 4).softmax(0) for h in range(4)])
                for t in range(2, QUESTION_ROWS + 2)
            ]
        )
        for block in range(7):
            share = shares_THS[:, :, block * BLOCK : (block + 1) * BLOCK].sum(-1).max()
            masses[block] += float(share) / 4
    best = [*sorted(range(1, 5), key=lambda block: -masses[block]), 5]
    assert looks.most_attended(count) == sorted(best[:count])


def test_one_layer_alone_does_not_decide_which_block_is_recomputed() -> None:
    """A head that attends by position gives one block all its weight for any question."""
    looks = BlockAttention(5 * BLOCK)
    key_GSD = torch.eye(5 * BLOCK)[None]
    for layer in range(4):
        rows_THD = torch.zeros(1, 1, 5 * BLOCK)
        rows_THD[0, 0, BLOCK * (1 if layer == 3 else 2)] = 900.0 if layer == 3 else 160.0
        looks.add(rows_THD, key_GSD)
    assert looks.mass()[:, 1].max() > looks.mass()[:, 2].max()
    assert looks.most_attended(1) == [2]


class _OtherRank(Collectives):
    """Imitates a second rank with the given masses in an all-reduce of maxima."""

    def __init__(self, mass_LM: torch.Tensor) -> None:
        self.mass_LM, self.calls = mass_LM, 0

    def max(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.maximum(x, self.mass_LM)


def test_ranks_combine_maxima_of_each_layer_before_the_mean() -> None:
    """Two heads on two ranks choose the blocks that they choose on one rank, with one collective."""
    torch.manual_seed(5)
    tokens = 6 * BLOCK
    layers = [(3 * torch.randn(4, 2, 16), torch.randn(2, tokens, 16)) for _ in range(3)]
    alone, second = BlockAttention(tokens), BlockAttention(tokens)
    for q_THD, k_GSD in layers:
        alone.add(q_THD, k_GSD)
        second.add(q_THD[:, 1:], k_GSD[1:])
    other = _OtherRank(second.mass())
    first = BlockAttention(tokens, other)
    for q_THD, k_GSD in layers:
        first.add(q_THD[:, :1], k_GSD[:1])
    assert first.most_attended(2) == alone.most_attended(2)
    assert other.calls == 1
    torch.testing.assert_close(first.mass(), alone.mass())


def test_chooses_blocks_by_last_question_rows_but_never_block_0() -> None:
    torch.manual_seed(0)
    looks = BlockAttention(5 * BLOCK + 5)
    key_GSD = torch.zeros(1, 5 * BLOCK + 9, 16)
    for place, channel in ((0, 0), (1, 1), (2, 2), (3, 3), (5, 4)):
        key_GSD[0, place * BLOCK, channel] = 1.0
    rows_THD = torch.zeros(QUESTION_ROWS + 1, 1, 16)
    rows_THD[0, 0, 2] = 900.0  # too early in the question to count
    rows_THD[1, 0, 3] = 100.0
    rows_THD[2, 0, 0] = 900.0
    rows_THD[3, 0, 4] = 900.0  # a partial block
    looks.add(rows_THD, key_GSD)
    assert looks.most_attended(1) == [3]
    other_THD = torch.zeros(2, 1, 16)
    other_THD[1, 0, 1] = 200.0
    looks.add(other_THD, key_GSD)
    assert looks.most_attended(1) == [1]
    assert looks.most_attended(2) == [1, 3]
    assert looks.most_attended(9) == [1, 2, 3, 4]


def test_recomputes_the_last_whole_block_only_after_all_others() -> None:
    """Heads that attend to near tokens give the last block most weight for any question."""
    looks = BlockAttention(4 * BLOCK + 5)
    key_GSD = torch.zeros(1, 4 * BLOCK + 9, 16)
    for place in range(4):
        key_GSD[0, place * BLOCK, place] = 1.0
    rows_THD = torch.zeros(2, 1, 16)
    rows_THD[0, 0, 3] = 900.0
    rows_THD[1, 0, 2] = 50.0
    looks.add(rows_THD, key_GSD)
    assert [looks.most_attended(count) for count in range(1, 5)] == [[2], [1, 2], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("tokens", [1, BLOCK, 2 * BLOCK - 1])
def test_recomputes_no_block_of_a_document_below_two_whole_blocks(tokens: int) -> None:
    looks = BlockAttention(tokens)
    looks.add(torch.randn(3, 2, 16), torch.randn(1, tokens + 3, 16))
    assert looks.most_attended(4) == []


class _Store:
    """The KV cache of one document."""

    def __init__(self, stack: LayerStack, ids_T: torch.Tensor) -> None:
        config = stack.config
        shape = (config.layers, len(ids_T), config.kv_heads, config.head_dim)
        self.stack, self.ids_T = stack, ids_T.to(stack.device)
        self.k_LTGD = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self.v_LTGD = torch.zeros_like(self.k_LTGD)

    def read(self, window: int) -> None:
        """Prefill the document with a sliding window of `window` tokens."""

        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            self.k_LTGD[layer], self.v_LTGD[layer] = k_TGD, v_TGD
            return _attend(q_THD, k_TGD, v_TGD, torch.arange(len(q_THD), device=q_THD.device), window)

        positions_T = torch.arange(len(self.ids_T), device=self.stack.device)
        self.stack.forward(self.stack.embed(self.ids_T), positions_T, attend)

    def recompute(self, blocks: list[int], own: int) -> None:
        """own: the number of the block after whose keys the blocks' new keys follow."""
        rows_P = rows_of_blocks(blocks, self.stack.device)

        queries = BlockQueries(self.stack, blocks, own)

        def keep(layer: int) -> KVRows:
            return KVRows(self.k_LTGD[layer], self.v_LTGD[layer], rows_P)

        def attend(layer: int, q_PHD: torch.Tensor) -> torch.Tensor:
            both = (self.k_LTGD[layer], self.v_LTGD[layer])
            whole = (torch.cat([x[: own * BLOCK], x[rows_P]]).transpose(0, 1) for x in both)
            return queries.attend(layer, q_PHD, *(x.contiguous() for x in whole))

        self.stack.run(self.stack.embed(self.ids_T[rows_P]), rows_P, AttentionCalls(keep, attend))

    def by_loops(self, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the KV expected after `recompute`, from full attention token by token."""
        k_LTGD, v_LTGD = self.k_LTGD.clone(), self.v_LTGD.clone()
        rows_P = rows_of_blocks(blocks, self.stack.device)

        def attend(layer: int, q_PHD: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor) -> torch.Tensor:
            k_LTGD[layer, rows_P], v_LTGD[layer, rows_P] = k_PGD, v_PGD
            return _attend(q_PHD, k_LTGD[layer], v_LTGD[layer], rows_P, len(self.ids_T))

        self.stack.forward(self.stack.embed(self.ids_T[rows_P]), rows_P, attend)
        return k_LTGD, v_LTGD


def _attend(
    q_PHD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, positions_P: torch.Tensor, window: int
) -> torch.Tensor:
    out_PHD = torch.empty_like(q_PHD)
    group = q_PHD.shape[1] // k_TGD.shape[1]
    for row, position in enumerate(positions_P.tolist()):
        span = slice(max(0, position + 1 - window), position + 1)
        for head in range(q_PHD.shape[1]):
            k_SD, v_SD = (x[span, head // group].float() for x in (k_TGD, v_TGD))
            out_PHD[row, head] = (k_SD @ q_PHD[row, head].float() * k_SD.shape[1] ** -0.5).softmax(0) @ v_SD
    return out_PHD


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", "float32"),
        pytest.param(
            ("cuda", "float16"),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ],
    ids="-".join,
)
def read_in_windows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Store:
    device, dtype = request.param
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    stack = load_model(ModelSpec(path=str(directory), dtype=dtype), device)
    ids_T = torch.randint(stack.config.vocab, (TOKENS,), generator=torch.Generator().manual_seed(3))
    store = _Store(stack, ids_T)
    store.read(window=40)
    return store


def _worst_row(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a head's key or value vector."""
    return float(((got - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).max())


def _rounding(store: _Store) -> float:
    """Return a tolerance for rounding errors: those of one layer, enlarged by all later layers."""
    return 1e-3 if store.stack.dtype == torch.float32 else 5e-2


def _copy(store: _Store) -> _Store:
    made = _Store(store.stack, store.ids_T)
    made.k_LTGD, made.v_LTGD = store.k_LTGD.clone(), store.v_LTGD.clone()
    return made


@pytest.mark.parametrize("whole", [False, True], ids=["until-last-block", "whole-document"])
@pytest.mark.parametrize("blocks", [[1], [2, 4], [1, 2, 3]])
def test_recomputes_blocks_like_the_oracle_and_changes_no_others(
    read_in_windows: _Store, blocks: list[int], whole: bool
) -> None:
    """The blocks' own new keys may follow the last block, or the whole document."""
    store = _copy(read_in_windows)
    want = store.by_loops(blocks)
    store.recompute(blocks, TOKENS // BLOCK if whole else blocks[-1])
    for got, expected in zip((store.k_LTGD, store.v_LTGD), want, strict=True):
        assert _worst_row(got, expected) < _rounding(store)
    changed = (store.k_LTGD != read_in_windows.k_LTGD).any(-1).any(-1)
    assert not changed[0].any(), "the first layer's keys depend on tokens alone"
    rows_P = rows_of_blocks(blocks, "cpu")
    assert changed[1:, rows_P].any(0).all()
    changed[:, rows_P] = False
    assert not changed.any()


def test_recomputing_densely_prefilled_blocks_changes_nothing(read_in_windows: _Store) -> None:
    store = _copy(read_in_windows)
    store.read(window=TOKENS)
    before = store.k_LTGD.clone(), store.v_LTGD.clone()
    store.recompute([1, 3, 4], own=4)
    for got, expected in zip((store.k_LTGD, store.v_LTGD), before, strict=True):
        assert _worst_row(got, expected) < _rounding(store)


def test_recomputing_all_blocks_equals_a_dense_prefill(read_in_windows: _Store) -> None:
    store, dense = _copy(read_in_windows), _copy(read_in_windows)
    dense.read(window=TOKENS)
    store.recompute([0, 1, 2, 3, 4], own=4)
    for got, expected in ((store.k_LTGD, dense.k_LTGD), (store.v_LTGD, dense.v_LTGD)):
        assert _worst_row(got, expected) < _rounding(store)
