"""Tests the Hopper kernel of anchor scores. On a CPU: the order in which TMA loads slots, and the grid. On a
GPU: the scores, in many launches."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.hopper.host import is_hopper
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.selectors.anchors.form import AnchorSettings, BlockAnchors, SideSettings
from deltafront.kernels.selectors.anchors.hopper_launch import key_tiles, launch, splits_of
from deltafront.kernels.selectors.rules.sums import Sums, empty_parts

LANES, DIM = 4, 64


def tile_of(descriptor: object, place: list[int]) -> torch.Tensor:
    """Return the tile of a tensor that TMA copies into shared memory."""
    whole = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)  # type: ignore[attr-defined]
    box = descriptor.block_shape  # type: ignore[attr-defined]
    return whole[tuple(slice(at, at + size) for at, size in zip(place, box, strict=True))]


@pytest.mark.parametrize("slots", [4, 8, 32, 64, 128])
def test_tma_loads_key_tiles_with_interleaved_quarters(slots: int) -> None:
    number = torch.arange(LANES * 3 * 128, dtype=torch.float32).view(2, 2, 3 * 128 // slots, slots)
    vector = number[..., None].expand(*number.shape, DIM).half().contiguous()
    vectors, counts = key_tiles(BlockAnchors(vector, number.int(), number))
    for lane in range(LANES):
        for tile in range(3):
            expected = (lane * 3 + tile) * 128 + torch.arange(128)
            pairs = tile_of(
                vectors, [lane, 0, tile * 4, 0, 0]
            )  # (1, 16 pairs, 4 quarters, 2, D), see `_by_block`
            assert torch.equal(pairs[0, ..., 0].permute(1, 0, 2).flatten().long(), expected)
            fours = tile_of(counts, [lane, 0, tile * 4, 0])  # (1, 8 fours, 4 quarters, 4)
            assert torch.equal(fours[0].permute(1, 0, 2).flatten().long(), expected)


@pytest.mark.parametrize("programs", [1, 16, 36, 64, 128, 131, 132, 133, 256, 1000])
@pytest.mark.parametrize("steps", [0, 1, 30, 112, 528])
def test_chooses_the_number_of_key_splits_with_the_shortest_time(programs: int, steps: int) -> None:
    """The total time is counted round by round, with 132 programs per round."""

    def time(splits: int) -> int:
        ends = [0] * 132
        for _ in range(programs * splits):
            ends[ends.index(min(ends))] += -(-steps // splits) + 3
        return max(ends)

    splits = splits_of(programs, steps, 132)
    assert time(splits) <= min(time(other) for other in range(1, 4 * 132 // programs + 2))


def table_of(heads: int, blocks: int, slots: int, first_block: int) -> BlockAnchors:
    """Make slots with different row counts, so that swapped tiles change the scores."""
    generator = torch.Generator("cuda").manual_seed(heads)
    shape = (1, heads, blocks, slots)
    vector = torch.randn(*shape, 128, device="cuda", generator=generator).to(torch.bfloat16)
    block_M1 = torch.arange(first_block, first_block + blocks, device="cuda")[:, None]
    first_MA = block_M1 * BLOCK + torch.arange(slots, device="cuda") * (BLOCK // slots)
    count = torch.randint(1, BLOCK // slots + 1, shape, device="cuda", generator=generator).float()
    return BlockAnchors(vector, first_MA.int().expand(shape).contiguous(), count)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("blocks", "first_block"), [(64, 0), (64, 64)])
def test_hopper_anchor_scores_are_correct_in_100_launches(blocks: int, first_block: int) -> None:
    """TMA once overwrote a tile before it was read, in a few launches. So 100 launches are compared."""
    heads, groups, tokens = 32, 8, blocks * BLOCK
    seen = first_block + blocks
    form = AnchorSettings(0.75, SideSettings(8), SideSettings(32))
    queries, keys = table_of(heads, blocks, 8, first_block), table_of(groups, seen, 32, 0)
    q_BHTD = torch.empty(1, heads, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k_BGSD = torch.empty(1, groups, seen * BLOCK, 128, device="cuda", dtype=torch.bfloat16)
    x = AttentionInput.of(q_BHTD, k_BGSD, k_BGSD, q_start=first_block * BLOCK)
    q_GXD = queries.vector_BGMAD.float().reshape(groups, -1, 128)
    k_GYD = keys.vector_BGMAD.float().reshape(groups, -1, 128)
    mass_GXMA = torch.exp(q_GXD @ k_GYD.mT * x.scale).view(groups, -1, seen, 32) * keys.count_BGMA[0][:, None]
    expected_HNRM = mass_GXMA.sum(3).log2().view(heads, blocks, 8, seen)
    before_N1M = torch.arange(seen) < torch.arange(first_block, seen)[:, None, None]
    before_HNRM = before_N1M.cuda().expand_as(
        expected_HNRM
    )  # without the diagonal, which another test covers
    for number in range(100):
        part = empty_parts(q_BHTD, (1, heads, blocks, 8), seen)
        part.fill_(float("nan"))
        launch(x, queries, keys, form, Sums(part, 0))
        error = (part[0].float() - expected_HNRM)[before_HNRM].abs()
        assert bool((error < 0.01).all()), (number, int((error >= 0.01).sum()), float(error.max()))
