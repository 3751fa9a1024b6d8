"""What the Hopper kernel of anchor scores relies on and a CPU can see: the order in which slots arrive, and
the grid. What it computes is compared where tests and benchmarks run on a GPU."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.selectors.anchors import BlockAnchors
from deltafront.kernels.selectors.anchors_hopper_launch import key_tiles, shares_of

LANES, DIM = 4, 64


def tile_of(descriptor: object, place: list[int]) -> torch.Tensor:
    """What the copy engine puts into shared memory: a box of the tensor that the descriptor describes."""
    whole = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)  # type: ignore[attr-defined]
    box = descriptor.block_shape  # type: ignore[attr-defined]
    return whole[tuple(slice(at, at + size) for at, size in zip(place, box, strict=True))]


@pytest.mark.parametrize("slots", [4, 8, 32, 64, 128])
def test_a_tile_arrives_with_its_quarters_interleaved(slots: int) -> None:
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
def test_keys_are_shared_so_that_all_end_soonest(programs: int, steps: int) -> None:
    """Against the rounds in which 132 multiprocessors take the programs, counted one by one."""

    def time(shares: int) -> int:
        ends = [0] * 132
        for _ in range(programs * shares):
            ends[ends.index(min(ends))] += -(-steps // shares) + 3
        return max(ends)

    shares = shares_of(programs, steps, 132)
    assert time(shares) <= min(time(other) for other in range(1, 4 * 132 // programs + 2))
