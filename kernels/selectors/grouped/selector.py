"""The base of selectors that score groups of rows, and two ablations: strided rows and block means.

Suffixes: I, J query and key groups.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch.nn import functional

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, Phase
from deltafront.kernels.options import NaiveOptions
from deltafront.kernels.selectors.grouped.kernel import Grouping, Groups, log_sums, pack
from deltafront.kernels.selectors.rules.sums import Sums
from deltafront.kernels.selectors.scored import ScoredSelector, SlabSums


class GroupedSelector(ScoredSelector):
    @abstractmethod
    def cpu_form(self, x: AttentionInput) -> torch.Tensor:
        """Compute float32 score_BHNM in torch."""

    @abstractmethod
    def groups(self, x: AttentionInput) -> Groups: ...

    def cpu_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return self.cpu_form(x)

    def slab_sums(self, x: AttentionInput, state: Any, phase: Phase) -> tuple[int, SlabSums]:
        with phase("scoring"):
            groups = self.groups(x)
        return groups.grouping.per_block, lambda first, blocks: Sums(log_sums(groups, first, blocks), first)


class NaiveSelector(GroupedSelector):
    """Ranks tiles by attention between every stride-th row of q and k."""

    name = "naive"

    def __init__(self, options: NaiveOptions) -> None:
        super().__init__(options)
        self.stride = options.stride
        if self.stride not in (2, 4, 8, 16):
            raise KernelInputError(f"stride {self.stride} is not 2, 4, 8 or 16")
        self.scored_share = 1.0 / self.stride**2

    def groups(self, x: AttentionInput) -> Groups:
        grouping = Grouping(self.stride, 1, BLOCK // self.stride)
        return pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, grouping)

    def cpu_form(self, x: AttentionInput) -> torch.Tensor:
        """Compute causal attention between the sampled rows of q and k, summed over tiles."""
        per_block = BLOCK // self.stride
        q_BHID, k_BGJD = _sampled(x.q_BHTD, self.stride), _sampled(x.k_BGSD, self.stride)
        logit_BHIJ = per_query_head(k_BGJD, q_BHID) * x.scale
        own_I = torch.arange(q_BHID.shape[2], device=q_BHID.device)
        valid_I = own_I * self.stride < x.q_BHTD.shape[2]
        own_I = own_I + x.first_block * per_block
        column_J = torch.arange(k_BGJD.shape[2], device=q_BHID.device)
        return tile_scores(logit_BHIJ, (column_J <= own_I[:, None]) & valid_I[:, None], per_block)


def _sampled(x: torch.Tensor, stride: int) -> torch.Tensor:
    return functional.pad(x[:, :, ::stride].float(), (0, 0, 0, (-x.shape[2] % BLOCK) // stride))


class BlockPoolSelector(GroupedSelector):
    """Ranks tiles by the block's mean query against the block's mean key."""

    name = "block_pool"
    scored_share = 1.0 / BLOCK**2

    def groups(self, x: AttentionInput) -> Groups:
        q_BHND, k_BGMD = _read_once(x.q_BHTD), _read_once(x.k_BGSD)
        return pack(q_BHND, k_BGMD, x.first_block, x.scale, Grouping(1, 1, 1))

    def cpu_form(self, x: AttentionInput) -> torch.Tensor:
        """Compute the softmax of mean(q) . mean(k) over the causal key blocks."""
        q_BHND, k_BGMD = block_means(x.q_BHTD), block_means(x.k_BGSD)
        row_N = torch.arange(x.query_blocks, device=q_BHND.device) + x.first_block
        column_M = torch.arange(x.key_blocks, device=q_BHND.device)
        return tile_scores(per_query_head(k_BGMD, q_BHND) * x.scale, column_M <= row_N[:, None], 1)


def block_means(x_BGSD: torch.Tensor) -> torch.Tensor:
    """Compute the float32 mean of each block of rows. An incomplete block counts only its rows."""
    batch, heads, rows, dim = x_BGSD.shape
    padded = functional.pad(x_BGSD.float(), (0, 0, 0, -rows % BLOCK)).view(batch, heads, -1, BLOCK, dim)
    start_M = torch.arange(padded.shape[2], device=x_BGSD.device) * BLOCK
    return padded.sum(3) / torch.clamp(rows - start_M, max=BLOCK)[:, None]


def _read_once(x_BGSD: torch.Tensor) -> torch.Tensor:
    """Compute `block_means` without a float32 copy of x."""
    full_rows = x_BGSD.shape[2] // BLOCK * BLOCK
    batch, heads, _, dim = x_BGSD.shape
    blocks = x_BGSD[:, :, :full_rows].reshape(batch, heads, -1, BLOCK, dim)
    parts = [blocks.mean(3, dtype=torch.float32)]
    if full_rows < x_BGSD.shape[2]:
        parts.append(block_means(x_BGSD[:, :, full_rows:]))
    return torch.cat(parts, dim=2).view(batch, heads, -1, dim)


def tile_scores(logit_BHIJ: torch.Tensor, allowed_IJ: torch.Tensor, per_block: int) -> torch.Tensor:
    """Softmax every row over its allowed columns, then sum tiles of per_block x per_block groups. Returns
    float32 score_BHNM. Rows without an allowed column add 0.
    """
    logit_BHIJ = logit_BHIJ.masked_fill(~allowed_IJ, float("-inf"))
    mass_BHIJ = torch.softmax(logit_BHIJ, dim=-1).nan_to_num(0.0)
    batch, heads, rows, columns = mass_BHIJ.shape
    tiles = mass_BHIJ.view(batch, heads, rows // per_block, per_block, columns // per_block, per_block)
    return tiles.sum(dim=(3, 5))


def per_query_head(k_BGJX: torch.Tensor, q_BHIX: torch.Tensor) -> torch.Tensor:
    """Compute q . k of every query head with its KV head: logit_BHIJ."""
    batch, heads, rows, width = q_BHIX.shape
    groups = k_BGJX.shape[1]
    stacked = q_BHIX.reshape(batch, groups, heads // groups * rows, width)
    return (stacked @ k_BGJX.transpose(2, 3)).view(batch, heads, rows, k_BGJX.shape[2])
