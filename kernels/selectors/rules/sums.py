"""log2 of scores, which score kernels pass to rules in slabs of query blocks.

Suffixes: R rows of logarithms of one query block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deltafront.kernels.interface import AttentionInput

PART_BYTES = 768 << 20
"""The most memory that one slab's logarithms take."""


@dataclass(frozen=True)
class Sums:
    """The log2 score parts of one slab.

    Attributes:
        part_BHNRM: log2 of the parts of tile scores, undefined after the diagonal. A score is the sum of its
            rows, each divided by its own sum.
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
    """Split the chunk's query blocks into slabs whose parts, `parts` rows a block, fit PART_BYTES. Yields
    each slab's first block and number of blocks.
    """
    batch, heads = x.q_BHTD.shape[:2]
    row_bytes = batch * heads * parts * (x.key_blocks + 16) * 2
    size = max(8, PART_BYTES // row_bytes // 8 * 8)
    for first in range(0, x.query_blocks, size):
        yield first, min(size, x.query_blocks - first)
