"""Delta-KV with the exact region of the paper (DeltaAttention), and variants to compare with, whose anchors
are not chosen by similarity.

A packed key is its anchor's own row. So exact and packed keys share one softmax over the prompt's keys, with
weights: 1 for an exact key, the run's length for an anchor of packed keys, 0 for other keys. A slab of query
blocks is computed at once. Shape suffixes are defined in `kernels.interface`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from deltafront.benchmarks.paper_forms.methods import (
    DeltaKVPeriodicOptions,
    DeltaKVRandomOptions,
    DeltaKVThesisOptions,
    PhaseOptions,
)
from deltafront.kernels.anchor_scan import find_anchors, leaders
from deltafront.kernels.attention.inputs import new_output
from deltafront.kernels.attention.packed.delta_kv import CHUNK
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask

SLAB = 8
"""Number of query blocks computed at once, limited by the memory of their weights."""


@dataclass
class DeltaKVState:
    """State of one prompt and layer.

    Attributes:
        chance_BGS: A random number for each key of the prompt, from which random anchors are chosen.
        keys_BGN: Number of keys that each query block of the last call attended to. The diagonal counts as a
            whole tile.
    """

    chance_BGS: torch.Tensor | None = None
    keys_BGN: torch.Tensor | None = None


@dataclass(frozen=True)
class Runs:
    """Runs of keys, and the keys that each query block of the chunk attends to.

    Attributes:
        length_BGS: Length of the run that begins with this anchor, 0 for other keys.
        exact_BGN: The first key that is attended to exactly, in phase 2.
        packed_BGN: Number of anchors that are attended to as packed keys, in phase 1.
    """

    length_BGS: torch.Tensor
    exact_BGN: torch.Tensor
    packed_BGN: torch.Tensor


def runs_of(is_anchor_BGS: torch.Tensor, begin_N: torch.Tensor, block: int) -> Runs:
    """Find the runs, and the anchors that each query block attends to as packed keys. Anchors form packed
    blocks of `block`. A packed block is used if all its runs end before the query block (section 4.1.4).

    Args:
        begin_N: First position of each query block.
    """
    keys = is_anchor_BGS.shape[2]
    place_S = torch.arange(keys, device=is_anchor_BGS.device)
    later_BGS = torch.where(is_anchor_BGS, place_S, keys).flip(2).cummin(2).values.flip(2)
    next_BGS = torch.nn.functional.pad(later_BGS[..., 1:], (0, 1), value=keys)
    length_BGS = torch.where(is_anchor_BGS, next_BGS - place_S, 0)
    upto_BGS = is_anchor_BGS.cumsum(2)
    # The run of the last anchor up to a query block's first key reaches into the block.
    over_BGN = upto_BGS[..., begin_N] - 1
    packed_BGN = over_BGN // block * block
    exact_BGN = torch.searchsorted(upto_BGS, packed_BGN + 1)
    return Runs(length_BGS, exact_BGN, packed_BGN)


class PhasedDeltaKV(ABC):
    """A backend in two phases. Phase 1 attends to the anchors of safe packed blocks, phase 2 to every key
    after these blocks. A packed block is safe if all its keys come before the query block."""

    def __init__(self, options: PhaseOptions) -> None:
        self._options = options

    def new_state(self, spec: StateSpec) -> DeltaKVState:
        return DeltaKVState()

    @abstractmethod
    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        """Mark the keys that are anchors: is_anchor_BGS. The first key is always one."""

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: DeltaKVState, phase: Phase
    ) -> torch.Tensor:
        x.require_aligned("delta_kv")
        keys = x.k_BGSD.shape[2]
        with phase("anchors"):
            begin_N = torch.arange(x.q_start, keys, BLOCK, device=x.k_BGSD.device)
            runs = runs_of(self.anchors(x, state), begin_N, self._options.block)
        out_BHTD = new_output(x)
        with phase("attention"):
            for first in range(x.q_start, keys, SLAB * BLOCK):
                self._attend_rows(x, runs, first, min(first + SLAB * BLOCK, keys), out_BHTD)
        state.keys_BGN = self._keys_read(runs, begin_N, keys)
        return out_BHTD

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: DeltaKVState) -> torch.Tensor:
        assert state.keys_BGN is not None, "tiles are counted after attending"
        return state.keys_BGN.sum(dtype=torch.float64) * (x.group / BLOCK)

    def _keys_read(self, runs: Runs, begin_N: torch.Tensor, keys: int) -> torch.Tensor:
        if not self._options.diagonal:
            end_N = (begin_N + BLOCK).clamp(max=keys)
            return (runs.length_BGS > 0).cumsum(2)[..., end_N - 1]
        packed_BGN = runs.packed_BGN if self._options.history else 0
        return packed_BGN + begin_N + BLOCK - runs.exact_BGN

    def _attend_rows(
        self, x: AttentionInput, runs: Runs, first: int, stop: int, out_BHTD: torch.Tensor
    ) -> None:
        """Compute the rows at positions first .. stop-1."""
        rows = slice(first - x.q_start, stop - x.q_start)
        bias_BGTS = self._weights(runs, first, stop, x.q_start).log_()
        bias_BHTS = bias_BGTS.repeat_interleave(x.group, dim=1)
        k_BHSD, v_BHSD = (
            kv[:, :, :stop].float().repeat_interleave(x.group, dim=1) for kv in (x.k_BGSD, x.v_BGSD)
        )
        out_BHTD[:, :, rows] = scaled_dot_product_attention(
            x.q_BHTD[:, :, rows].float(), k_BHSD, v_BHSD, attn_mask=bias_BHTS, scale=x.scale
        ).to(out_BHTD.dtype)

    def _weights(self, runs: Runs, first: int, stop: int, q_start: int) -> torch.Tensor:
        """Return float32 weight_BGTS of the keys before `stop`."""
        options = self._options
        position_T = torch.arange(first, stop, device=runs.length_BGS.device)
        age_TS = position_T[:, None] - torch.arange(stop, device=position_T.device) + 1
        seen_BGTS = torch.minimum(runs.length_BGS[:, :, None, :stop], age_TS).clamp_(min=0).float()
        if not options.counts:
            seen_BGTS = (seen_BGTS > 0).float()
        if not options.diagonal:
            return seen_BGTS
        exact_BGT = runs.exact_BGN[..., (position_T - q_start) // BLOCK]
        exact_BGTS = torch.arange(stop, device=position_T.device) >= exact_BGT[..., None]
        packed_BGTS = seen_BGTS if options.history else torch.zeros_like(seen_BGTS)
        return torch.where(exact_BGTS, (age_TS > 0).float(), packed_BGTS)


class SimilarKeys(PhasedDeltaKV):
    def __init__(self, options: DeltaKVThesisOptions) -> None:
        super().__init__(options)
        self._cos, self._distance = options.cos, options.distance

    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        if self._distance == 0:
            return find_anchors(x.k_BGSD, self._cos, CHUNK)
        padded_BGSD = torch.nn.functional.pad(x.k_BGSD.float(), (0, 0, 0, -x.k_BGSD.shape[2] % CHUNK))
        rows_LRD = padded_BGSD.reshape(-1, CHUNK, padded_BGSD.shape[3])
        apart_LRR = torch.cdist(rows_LRD, rows_LRD, compute_mode="donot_use_mm_for_euclid_dist")
        is_anchor_LR = leaders(apart_LRR <= self._distance)
        return is_anchor_LR.view(padded_BGSD.shape[:3])[..., : x.k_BGSD.shape[2]]


class PeriodicKeys(PhasedDeltaKV):
    def __init__(self, options: DeltaKVPeriodicOptions) -> None:
        super().__init__(options)
        self._every = options.every

    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        place_S = torch.arange(x.k_BGSD.shape[2], device=x.k_BGSD.device)
        return (place_S % self._every == 0).expand(x.k_BGSD.shape[:3])


class RandomKeys(PhasedDeltaKV):
    def __init__(self, options: DeltaKVRandomOptions) -> None:
        super().__init__(options)
        self._keep, self._seed = options.keep, options.seed

    def new_state(self, spec: StateSpec) -> DeltaKVState:
        """Draw anchors from seed, layer and prompt length alone, so that any new state gets the same."""
        generator = torch.Generator().manual_seed(self._seed * 1009 + spec.layer)
        chance_BGS = torch.rand(spec.batch, spec.kv_heads, spec.max_tokens, generator=generator)
        chance_BGS[..., 0] = 0.0
        return DeltaKVState(chance_BGS.to(spec.device))

    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        assert state.chance_BGS is not None
        return state.chance_BGS[..., : x.k_BGSD.shape[2]] < self._keep
