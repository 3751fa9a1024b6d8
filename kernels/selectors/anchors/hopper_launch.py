"""Launches the Hopper kernel of anchor scores."""

from dataclasses import dataclass
from functools import cache

from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.hopper.host import TileDescriptor, multiprocessors
from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.launches import Launcher, cdiv, strides
from deltafront.kernels.selectors.anchors.form import AnchorSettings, BlockAnchors
from deltafront.kernels.selectors.anchors.hopper import WARPGROUPS, anchors_hopper_kernel
from deltafront.kernels.selectors.rules.sums import Sums

_score = Launcher(anchors_hopper_kernel)
_BEGIN = 3
"""Start-up time of a program, in units of one key tile's time."""


@dataclass(frozen=True)
class ScorePlan:
    dim: int
    q_slots: int
    k_slots: int
    stages: int = 4
    registers: int = 112

    @property
    def units(self) -> int:
        """The number of (query block, head) pairs that fit in a warpgroup."""
        return WARPGROUP_ROWS // self.q_slots

    @property
    def blocks(self) -> int:
        return BLOCK // self.k_slots


def launch(
    x: AttentionInput, queries: BlockAnchors, keys: BlockAnchors, form: AnchorSettings, sums: Sums
) -> None:
    """Compute `sums.part_BHNRM` for inputs that satisfy `scores.takes_hopper`."""
    part, first_row = sums.part_BHNRM, sums.first_row
    batch, kv_heads, _, dim = x.k_BGSD.shape
    blocks = part.shape[2]
    plan = plan_of(dim, form.q.cap, form.k.cap)
    tiles = cdiv(blocks * x.group, plan.units * WARPGROUPS.value)
    steps = (x.first_block + first_row + blocks) // plan.blocks
    splits = splits_of(tiles * batch * kv_heads, steps, multiprocessors(x.q_BHTD.device))
    tables = (keys.first_BGMA, queries.vector_BGMAD, queries.first_BGMA, queries.count_BGMA)
    sizes = (kv_heads, x.group, x.query_blocks, x.first_block, first_row, blocks)
    _score[(tiles, batch * kv_heads, splits)](
        *key_tiles(keys),
        *tables,
        part,
        *strides(keys.count_BGMA, dims=2),
        *strides(part, dims=4),
        *sizes,
        x.scale * LOG2E,
        PLAN=plan,
        num_warps=4,
    )


def key_tiles(keys: BlockAnchors) -> tuple[TileDescriptor, TileDescriptor]:
    """Make the TMA descriptors of the key slots' vectors and counts. A load brings a tile of 128 slots with
    its four quarters interleaved."""
    vector, count = keys.vector_BGMAD, keys.count_BGMA
    lanes, dim = vector.shape[0] * vector.shape[1], vector.shape[4]
    slots = vector.shape[2] * vector.shape[3]
    pairs, fours = (1, 16, 4, 2, dim), (1, 8, 4, 4)
    in_pairs = [lanes, 16, slots // 32, 2, dim], [slots * dim, 2 * dim, 32 * dim, dim, 1]
    in_fours = [lanes, 8, slots // 32, 4], [slots, 4, 32, 1]
    return TileDescriptor(vector, *in_pairs, pairs), TileDescriptor(count, *in_fours, fours)


plan_of = cache(ScorePlan)


def splits_of(programs: int, steps: int, multiprocessors: int) -> int:
    """Return the number of splits of each program's `steps` key tiles that gives the shortest run time."""

    def time(splits: int) -> int:
        return -(-programs * splits // multiprocessors) * (-(-steps // splits) + _BEGIN)

    return min(range(1, -(-4 * multiprocessors // programs) + 1), key=time)
