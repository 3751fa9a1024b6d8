"""Logarithms of scores, slab by slab, from score kernels to rules.

Suffixes: R rows of logarithms of one query block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...interface import AttentionInput

PART_BYTES = 768 << 20
"""Most memory of one slab's logarithms."""


@dataclass(frozen=True)
class Sums:
    """log2 of the parts of a slab's tile scores: part_BHNRM, N query blocks from `first_row` on; undefined
    after the diagonal.

    normalised: every part row's values are divided by their sum first, else by that of all. largest: the
    score is the rows' largest, not their sum.
    """

    part_BHNRM: torch.Tensor
    first_row: int
    normalised: bool = True
    largest: bool = False


def empty_parts(like: torch.Tensor, rows: tuple[int, ...], columns: int) -> torch.Tensor:
    """fp16 (*rows, columns), every row on 32 bytes."""
    return torch.empty((*rows, -(-columns // 16) * 16), dtype=torch.float16, device=like.device)[
        ..., :columns
    ]


def slabs(x: AttentionInput, parts: int) -> Iterator[tuple[int, int]]:
    """(first query block, query blocks) of slabs whose logarithms, `parts` rows a block, fit PART_BYTES."""
    batch, heads = x.q_BHTD.shape[:2]
    row_bytes = batch * heads * parts * (x.key_blocks + 16) * 2
    size = max(8, PART_BYTES // row_bytes // 8 * 8)
    for first in range(0, x.query_blocks, size):
        yield first, min(size, x.query_blocks - first)
