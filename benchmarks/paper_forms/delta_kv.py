"""Delta-KV with the thesis's own exact region, and with anchors that are not chosen by similarity.

Shape suffixes as in `kernels.interface`; P anchors of a key head, J keys that a query block attends to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ...kernels.anchor_scan import find_anchors
from ...kernels.constants import BLOCK
from ...kernels.executors.inputs import attend_keys, new_output
from ...kernels.executors.packed.delta_kv import CHUNK
from ...kernels.interface import AttentionInput, Phase, StateSpec, TileMask
from .methods import DeltaKVPeriodicOptions, DeltaKVRandomOptions, DeltaKVThesisOptions, PhaseOptions


@dataclass
class DeltaKVState:
    """chance_BGS: a number for every key of the prompt, for anchors by chance. keys_BGN: keys that the last
    call's query blocks attended to."""

    chance_BGS: torch.Tensor | None = None
    keys_BGN: torch.Tensor | None = None


@dataclass(frozen=True)
class Anchors:
    """The anchors of one key head. first_P: positions. stop_P: behind each one's run."""

    first_P: torch.Tensor
    stop_P: torch.Tensor

    @classmethod
    def of(cls, is_anchor_S: torch.Tensor) -> Anchors:
        first_P = is_anchor_S.nonzero()[:, 0]
        return cls(first_P, torch.cat([first_P[1:], first_P.new_tensor([is_anchor_S.numel()])]))

    def safe(self, before: int, block: int) -> int:
        """How many lie in packed blocks that reach no key from `before` on (section 4.1.4)."""
        return int((self.stop_P <= before).sum()) // block * block


class PhasedDeltaKV(ABC):
    """An executor. Phase 1 attends to the anchors of safe packed blocks, phase 2 to every key behind their
    reach. A packed block with a key of the query block or a later one is not safe."""

    def __init__(self, options: PhaseOptions) -> None:
        self._options = options

    def new_state(self, spec: StateSpec) -> DeltaKVState:
        return DeltaKVState()

    @abstractmethod
    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        """is_anchor_BGS; the first key is one."""

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: DeltaKVState, phase: Phase
    ) -> torch.Tensor:
        x.require_aligned("delta_kv")
        with phase("anchors"):
            is_anchor_BGS = self.anchors(x, state)
        out_BHTD = new_output(x)
        keys_BGN = torch.zeros(*is_anchor_BGS.shape[:2], x.query_blocks, dtype=torch.float64)
        with phase("attention"):
            for b, g in torch.cartesian_prod(*(torch.arange(n) for n in is_anchor_BGS.shape[:2])).tolist():
                anchors = Anchors.of(is_anchor_BGS[b, g])
                for n in range(x.query_blocks):
                    keys_BGN[b, g, n] = self._attend_block(x, b, g, n, anchors, out_BHTD)
        state.keys_BGN = keys_BGN
        return out_BHTD

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: DeltaKVState) -> torch.Tensor:
        assert state.keys_BGN is not None, "tiles are counted after attending"
        return (state.keys_BGN.sum() * (x.group / BLOCK)).to(x.q_BHTD.device)

    def _attend_block(
        self, x: AttentionInput, b: int, g: int, n: int, anchors: Anchors, out_BHTD: torch.Tensor
    ) -> int:
        """Attend with a group's heads. Returns the keys read, the diagonal's as a whole tile."""
        begin = x.q_start + n * BLOCK
        end = min(begin + BLOCK, x.k_BGSD.shape[2])
        rows = slice(n * BLOCK, end - x.q_start)
        packed, exact_from = self._phases(anchors, begin, end)
        first_P, stop_P = anchors.first_P[:packed], anchors.stop_P[:packed]
        exact_J = torch.arange(exact_from, end, device=first_P.device)
        position_T1 = torch.arange(begin, end, device=first_P.device)[:, None]
        seen_TP = torch.minimum(position_T1 - first_P + 1, stop_P - first_P).clamp(min=0)
        weight_TP = seen_TP if self._options.counts else seen_TP > 0
        bias_TJ = torch.cat([weight_TP, exact_J <= position_T1], dim=1).float().log()
        key_J = torch.cat([first_P, exact_J])
        k_JD, v_JD = (kv[b, g].index_select(0, key_J) for kv in (x.k_BGSD, x.v_BGSD))
        heads = slice(g * x.group, (g + 1) * x.group)
        out = attend_keys(x.q_BHTD[b, heads, rows], k_JD, v_JD, bias_TJ, x.scale)
        out_BHTD[b, heads, rows] = out.to(out_BHTD.dtype)
        return key_J.numel() + (BLOCK - (end - begin) if self._options.diagonal else 0)

    def _phases(self, anchors: Anchors, begin: int, end: int) -> tuple[int, int]:
        """Anchors that phase 1 reads, and the first exact key, for the query block begin .. end-1."""
        if not self._options.diagonal:
            return int((anchors.first_P < end).sum()), end
        safe = anchors.safe(begin, self._options.block)
        exact_from = int(anchors.stop_P[safe - 1]) if safe else 0
        return (safe if self._options.history else 0), exact_from


class SimilarKeys(PhasedDeltaKV):
    def __init__(self, options: DeltaKVThesisOptions) -> None:
        super().__init__(options)
        by_distance = options.distance > 0
        self._threshold = options.distance if by_distance else options.cos
        self._metric = "euclidean" if by_distance else "cosine"

    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        return find_anchors(x.k_BGSD, self._threshold, CHUNK, self._metric)


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
        """The same choice for the same prompt length, wherever a state begins."""
        generator = torch.Generator().manual_seed(self._seed * 1009 + spec.layer)
        chance_BGS = torch.rand(spec.batch, spec.kv_heads, spec.max_tokens, generator=generator)
        chance_BGS[..., 0] = 0.0
        return DeltaKVState(chance_BGS.to(spec.device))

    def anchors(self, x: AttentionInput, state: DeltaKVState) -> torch.Tensor:
        assert state.chance_BGS is not None
        return state.chance_BGS[..., : x.k_BGSD.shape[2]] < self._keep
