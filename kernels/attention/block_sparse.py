"""Block-sparse attention over each query block's tiles of a mask. Shape suffixes: J keys of these tiles."""

import torch

from deltafront.kernels.attention.inputs import QueryRows, attend_keys, check_mask, new_output
from deltafront.kernels.attention.launch import launch
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask, runs_on_cpu


class BlockSparseBackend:
    def __init__(self, options: object = None) -> None:
        """Ignore `options`, which every backend accepts: block-sparse attention has none."""

    def new_state(self, spec: StateSpec) -> None:
        return None

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        kept = check_mask(x, mask, "block_sparse")
        with phase("attention"):
            return cpu_attend(x, kept) if runs_on_cpu(x.q_BHTD, "block_sparse") else kernel_attend(x, kept)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        return check_mask(x, mask, "block_sparse").count_BHN.sum(dtype=torch.float64)


def cpu_attend(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    """Compute attention of each query block over the keys of its kept tiles, causally, on the CPU."""
    batch, heads, rows, _ = x.q_BHTD.shape
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype)
    counts = mask.count_BHN.tolist()
    for b in range(batch):
        for h in range(heads):
            for n in range(x.query_blocks):
                tile_M = mask.index_BHNM[b, h, n, : counts[b][h][n]].long()
                begin, end = n * BLOCK, min((n + 1) * BLOCK, rows)
                out_BHTD[b, h, begin:end] = _attend_block(x, b, h, begin, end, tile_M)
    return out_BHTD


def _attend_block(
    x: AttentionInput, b: int, h: int, begin: int, end: int, tile_M: torch.Tensor
) -> torch.Tensor:
    key_J = keys_of(tile_M, x.q_start + end)
    position_T1 = torch.arange(x.q_start + begin, x.q_start + end)[:, None]
    g = h // x.group
    k_JD, v_JD = (kv[b, g].index_select(0, key_J) for kv in (x.k_BGSD, x.v_BGSD))
    heads = slice(h, h + 1)
    out_HTD = attend_keys(x, heads, x.q_BHTD[b, heads, begin:end], k_JD, v_JD, key_J <= position_T1)
    return out_HTD[0].to(x.q_BHTD.dtype)


def keys_of(tile_M: torch.Tensor, stop: int) -> torch.Tensor:
    """List the positions below `stop` of the keys in these tiles."""
    key_J = (tile_M[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    return key_J[key_J < stop]


def kernel_attend(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    """Compute `cpu_attend` on the GPU. Each tile list must end with the diagonal tile, the only one that gets
    a causal mask."""
    kept = check_mask(x, mask, "block_sparse")
    out_BHTD = new_output(x)
    launch(x, QueryRows(x.q_BHTD, out_BHTD, x.q_start), mask=kept)
    return out_BHTD
