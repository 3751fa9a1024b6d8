"""Anchor scores as a selector. Shape suffixes as in `table.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import BLOCK, AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ...methods import Value
from ..rules import reference as rules
from ..rules.rule import Rule
from . import reference
from .table import AnchorSettings, BlockAnchors, KeyAnchors, Overflow, Representative, SideSettings


class AnchorsSelector:
    """DPXA (DeltaAttention, section 4.3) in our bounded form; docs/decisions/0003 says what differs.

    values: `tau`, `cos`, `q_anchors`, `k_anchors`. The keyword arguments open the rest of the form (see
    `SideSettings` and `AnchorSettings`). The thesis's own: q_anchors = k_anchors = 128, both
    representatives "anchor", weighted and row_normalised False. `rule` replaces the cumulative rule.
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        *,
        rule: Rule | None = None,
        q_representative: Representative = "mean",
        k_representative: Representative = "mean",
        q_overflow: Overflow = "drop",
        k_overflow: Overflow = "drop",
        weighted: bool = True,
        row_normalised: bool = True,
    ) -> None:
        self.form = AnchorSettings(
            cos=float(values["cos"]),
            q=SideSettings(int(values["q_anchors"]), q_representative, q_overflow),
            k=SideSettings(int(values["k_anchors"]), k_representative, k_overflow),
            weighted=weighted,
            row_normalised=row_normalised,
        )
        self.rule = rule or Rule("cumulative", float(values["tau"]))
        self.sampled = self.form.q.cap * self.form.k.cap / BLOCK**2

    def new_state(self, spec: StateSpec) -> KeyAnchors:
        shape = (spec.batch, spec.kv_heads, -(-spec.max_tokens // BLOCK), self.form.k.cap)
        return KeyAnchors(
            BlockAnchors(
                vector_BGMAD=torch.zeros(*shape, spec.head_dim, dtype=spec.dtype, device=spec.device),
                first_BGMA=torch.zeros(shape, dtype=torch.int32, device=spec.device),
                count_BGMA=torch.zeros(shape, dtype=torch.int32, device=spec.device),
            )
        )

    def scores(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> torch.Tensor:
        """float32 score_BHNM, for measuring the estimate itself; adds the chunk's keys to the state."""
        with phase("anchors"):
            self._add_keys(x, state)
            queries = reference.summarise(x.q_BHTD, self.form.cos, self.form.q, x.first_block)
            keys = _first_blocks(state.table, x.key_blocks)
        with phase("scoring"):
            return reference.scores(x, queries, keys, self.form)

    def select(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> TileMask:
        x.require_aligned("anchors")
        score_BHNM = self.scores(x, state, phase)
        with phase("selection"):
            return rules.select(score_BHNM, self.rule, x.first_block)

    def _add_keys(self, x: AttentionInput, state: KeyAnchors) -> None:
        """Summarise the key blocks from this chunk on, and any before it that are not there yet."""
        held = state.table.count_BGMA
        if x.key_blocks > held.shape[2] or held.shape[:2] != x.k_BGSD.shape[:2]:
            raise KernelInputError(
                f"the state holds {tuple(held.shape[:3])} (batch, key heads, blocks), which does not fit "
                f"{x.k_BGSD.shape[0]}, {x.k_BGSD.shape[1]}, {x.key_blocks}"
            )
        start = min(state.done, x.first_block)
        new = reference.summarise(x.k_BGSD[:, :, start * BLOCK :], self.form.cos, self.form.k, start)
        state.table.vector_BGMAD[:, :, start : x.key_blocks] = new.vector_BGMAD.to(x.k_BGSD.dtype)
        state.table.first_BGMA[:, :, start : x.key_blocks] = new.first_BGMA
        state.table.count_BGMA[:, :, start : x.key_blocks] = new.count_BGMA
        state.done = x.key_blocks


def _first_blocks(table: BlockAnchors, blocks: int) -> BlockAnchors:
    return BlockAnchors(
        table.vector_BGMAD[:, :, :blocks], table.first_BGMA[:, :, :blocks], table.count_BGMA[:, :, :blocks]
    )
