"""Launches our Hopper GEMM for large M, where it beats cuBLAS. Shape suffixes are defined in `linear.py`."""

from functools import lru_cache

import torch

from deltafront.kernels.hopper.host import TileDescriptor, is_hopper, multiprocessors
from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS
from deltafront.kernels.launches import Launcher, cdiv
from deltafront.kernels.layers.linear_hopper import DEPTH, PIECE, WARPGROUPS, linear_hopper_kernel

_product = Launcher(linear_hopper_kernel)
_ROWS = WARPGROUPS.value * WARPGROUP_ROWS
_FEWEST_ROWS = 1024
"""With fewer rows, cuBLAS's smaller tiles are faster."""
_FILLED = {False: 0.94, True: 0.88}
"""Minimum of `filled` at which our kernel beats cuBLAS, by `gated` (docs/log/2026-11-25.md at 4fe709c6)."""


def takes(x_TI: torch.Tensor, weight_OI: torch.Tensor, *, gated: bool) -> bool:
    """Say whether the kernel supports these inputs and its tiles fill the GPU."""
    rows, out = x_TI.shape[0], weight_OI.shape[0]
    if rows < _FEWEST_ROWS or not fits(weight_OI) or not _copyable(x_TI):
        return False
    return filled(rows, out, multiprocessors(x_TI.device)) >= _FILLED[gated]


def fits(weight_OI: torch.Tensor) -> bool:
    if weight_OI.dtype == torch.float32 or not is_hopper(weight_OI.device):
        return False
    return weight_OI.shape[0] % (2 * PIECE.value) == 0 and _copyable(weight_OI)


@lru_cache(1024)
def filled(rows: int, width: int, multiprocessors: int) -> float:
    """Return the share of GPU time that computes real outputs. Padding and the partial last wave take the
    rest.

    width: Output channels, gate and up together.
    """
    columns = 2 * PIECE.value
    tiles = cdiv(rows, _ROWS) * cdiv(width, columns)
    computed = cdiv(tiles, multiprocessors) * multiprocessors * _ROWS * columns
    return float(rows * width / computed)


def launch(x_TI: torch.Tensor, weight_OI: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Launch the kernel for inputs that satisfy `takes`, with any number of rows."""
    rows, width = x_TI.shape
    columns = weight_OI.shape[0] // (2 if gated else 1)
    out_TO = torch.empty((rows, columns), dtype=x_TI.dtype, device=x_TI.device)
    piece = PIECE.value
    row_tiles, column_tiles = cdiv(rows, _ROWS), weight_OI.shape[0] // (2 * piece)
    _product[(min(row_tiles * column_tiles, multiprocessors(x_TI.device)),)](
        _descriptor(x_TI, WARPGROUP_ROWS, DEPTH.value),
        _descriptor(weight_OI, piece, DEPTH.value),
        _descriptor(out_TO, WARPGROUP_ROWS, piece),
        row_tiles,
        column_tiles,
        cdiv(width, DEPTH.value),
        columns if gated else piece,
        GATED=gated,
        num_warps=4,
    )
    return out_TO


def _copyable(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> TileDescriptor:
    return TileDescriptor(x, x.shape, (x.stride(0), 1), (rows, columns))
