"""Tests split keys: the plan by brute force, the merge of splits, and the whole on a GPU."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.attention.hopper.launch import launch
from deltafront.kernels.attention.hopper.split import merge_splits, splits_of
from deltafront.kernels.attention.inputs import QueryRows
from deltafront.kernels.correction import cpu_dense_rows
from deltafront.kernels.interface import AttentionInput
from deltafront.tests.numerics import assert_rows_close, poisoned_empty, random_input

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def simulated(items: int, tiles: int, splits: int, programs: int) -> int:
    """Return the time of the last program, in tiles, if programs take equal items in turn."""
    ends = [0] * programs
    for _ in range(items * splits):
        first = min(range(programs), key=ends.__getitem__)
        ends[first] += -(-tiles // splits) + 8
    return max(ends)


@pytest.mark.parametrize("items", [1, 8, 32, 64, 66])
@pytest.mark.parametrize("tiles", [1, 2, 9, 130, 1024])
@pytest.mark.parametrize("programs", [132, 78])
def test_no_other_number_of_parts_is_faster(items: int, tiles: int, programs: int) -> None:
    chosen = splits_of(items, tiles, tiles, programs)
    assert 1 <= chosen <= min(16, tiles)
    times = [simulated(items, tiles, splits, programs) for splits in range(1, min(16, tiles) + 1)]
    assert times[chosen - 1] == min(times)


def test_each_part_of_the_shortest_item_has_a_tile() -> None:
    assert splits_of(8, 1024, 1024, 132) == 16
    assert splits_of(8, 1024, 3, 132) == 3


@pytest.mark.parametrize(("batch", "splits", "rows"), [(1, 1, 5), (2, 3, 37), (1, 16, 16)])
def test_merged_parts_equal_softmax_over_all_keys(batch: int, splits: int, rows: int) -> None:
    heads, dim, keys = 3, 64, 8
    generator = torch.Generator().manual_seed(3)
    s_PHRK = torch.randn(batch * splits, heads, rows, keys, generator=generator, dtype=torch.float64) * 4
    v_PHKD = torch.randn(batch * splits, heads, keys, dim, generator=generator, dtype=torch.float64)
    split_PHRD = s_PHRK.softmax(3) @ v_PHKD
    lse_PHR = s_PHRK.logsumexp(3) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    if splits > 1:  # the first row has no key in the first split
        s_PHRK[::splits, :, 0], split_PHRD[::splits, :, 0], lse_PHR[::splits, :, 0] = -torch.inf, 0, -1e30
    joined = s_PHRK.unflatten(0, (batch, splits)).permute(0, 2, 3, 1, 4).flatten(3)
    v_BHSD = v_PHKD.unflatten(0, (batch, splits)).transpose(1, 2).flatten(2, 3)
    out_BRHD = torch.full((batch, rows, heads, dim), torch.nan, device=DEVICE)
    merge_splits(split_PHRD.float().to(DEVICE), lse_PHR.float().to(DEVICE), out_BRHD.transpose(1, 2))
    assert_rows_close(out_BRHD.transpose(1, 2).cpu(), (joined.softmax(3) @ v_BHSD).float())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="split keys are of Hopper's kernel")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("tokens", "rows", "gamma", "tail"),
    [
        (20_000, 4_000, 64, 3_840),
        (20_011, 4_000, 16, 3_840),
        (9_001, 1, 1, 1),
        (9_001, 130, 1, 0),
        (300, 300, 7, 256),
    ],
)
def test_few_rows_of_many_keys_equal_the_cpu_version(
    head_dim: int, tokens: int, rows: int, gamma: int, tail: int
) -> None:
    x = random_input(
        tokens,
        rows=rows,
        q_heads=4,
        kv_heads=2,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=DEVICE,
        batch=2,
    )
    made = []
    for part, row0, step in ((slice(0, tail, gamma), 0, gamma), (slice(tail, None), tail, 1)):
        q_BHRD = x.q_BHTD[:, :, part]
        made.append(QueryRows(q_BHRD, torch.full_like(q_BHRD, torch.nan), x.q_start + row0, step))
    some = [each for each in made if each.q_BHRD.shape[2]]
    with poisoned_empty():
        launch(x, some[0], some[1] if len(some) > 1 else None, mask=None, packed=None)
    y = AttentionInput.of(*(t.float().cpu() for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)))
    for each, expected in zip(made, cpu_dense_rows(y, 0, gamma, tail), strict=True):
        if expected.shape[2]:
            assert_rows_close(each.out_BHRD.cpu(), expected, dtype=torch.bfloat16)
