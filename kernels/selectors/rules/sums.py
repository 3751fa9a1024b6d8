"""The output of score kernels for a slab (consecutive query blocks). Selection rules compute tile scores from
it.

Shape suffixes: R rows of one query block, such as its anchor slots or groups of query rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deltafront.kernels.interface import AttentionInput

PART_BYTES = 768 << 20
"""Maximum memory of one slab's logarithms, in bytes."""


@dataclass(frozen=True)
class Sums:
    """Unnormalised log2 scores of one slab.

    Attributes:
        part_BHNRM: log2 of each row's sum of exponentials in key block M, undefined after the diagonal. A
            tile's score is the sum over R of these sums, each divided by its row's total over M.
        first_row: The slab's first query block.
    """

    part_BHNRM: torch.Tensor
    first_row: int


def empty_parts(like: torch.Tensor, rows: tuple[int, ...], columns: int) -> torch.Tensor:
    """Allocate fp16 (*rows, columns), with each row aligned to 32 bytes."""
    return torch.empty((*rows, -(-columns // 16) * 16), dtype=torch.float16, device=like.device)[
        ..., :columns
    ]


def slabs(x: AttentionInput, parts: int) -> Iterator[tuple[int, int]]:
    """Split the chunk's query blocks into slabs whose `Sums` fit PART_BYTES, with `parts` rows (R) per query
    block. Yield each slab's first block and number of blocks."""
    batch, heads = x.q_BHTD.shape[:2]
    row_bytes = batch * heads * parts * (x.key_blocks + 16) * 2
    size = max(8, PART_BYTES // row_bytes // 8 * 8)
    for first in range(0, x.query_blocks, size):
        yield first, min(size, x.query_blocks - first)
