"""Anchor scores as a selector. Shape suffixes as in `table.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import BLOCK, AttentionInput, KernelInputError, Phase, StateSpec
from ...methods import Value
from ..rules.rule import Rule
from ..scored import ScoredSelector, SlabSums
from . import reference
from .table import AnchorSettings, BlockAnchors, KeyAnchors, Overflow, Representative, SideSettings


class AnchorsSelector(ScoredSelector):
    """DPXA (DeltaAttention, section 4.3) in our bounded form; docs/decisions/0003 says what differs.

    values: `tau`, `cos`, `q_anchors`, `k_anchors`. The keyword arguments open the rest of the form (see
    `SideSettings` and `AnchorSettings`). The thesis's own: q_anchors = k_anchors = 128, both
    representatives "anchor", k_relax None, weighted and row_normalised False.
    """

    name = "anchors"

    def __init__(
        self,
        values: Mapping[str, Value],
        *,
        rule: Rule | None = None,
        q_representative: Representative = "mean",
        k_representative: Representative = "mean",
        q_overflow: Overflow = "drop",
        k_overflow: Overflow = "drop",
        k_relax: float | None = 0.15,
        weighted: bool = True,
        row_normalised: bool = True,
    ) -> None:
        super().__init__(values, rule)
        self.form = AnchorSettings(
            cos=float(values["cos"]),
            q=SideSettings(int(values["q_anchors"]), q_representative, q_overflow),
            k=SideSettings(int(values["k_anchors"]), k_representative, k_overflow, k_relax),
            weighted=weighted,
            row_normalised=row_normalised,
        )
        self.sampled = self.form.q.cap * self.form.k.cap / BLOCK**2

    def new_state(self, spec: StateSpec) -> KeyAnchors:
        shape = (spec.batch, spec.kv_heads, -(-spec.max_tokens // BLOCK), self.form.k.cap)
        return KeyAnchors(
            BlockAnchors(
                vector_BGMAD=torch.zeros(*shape, spec.head_dim, dtype=spec.dtype, device=spec.device),
                first_BGMA=torch.zeros(shape, dtype=torch.int32, device=spec.device),
                count_BGMA=torch.zeros(shape, dtype=torch.float32, device=spec.device),
            )
        )

    def reference_scores(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> torch.Tensor:
        with phase("anchors"):
            start = _first_missing(x, state)
            new = reference.summarise(x.k_BGSD[:, :, start * BLOCK :], self.form.cos, self.form.k, start)
            state.table.vector_BGMAD[:, :, start : x.key_blocks] = new.vector_BGMAD.to(x.k_BGSD.dtype)
            state.table.first_BGMA[:, :, start : x.key_blocks] = new.first_BGMA
            state.table.count_BGMA[:, :, start : x.key_blocks] = new.count_BGMA
            state.done = x.key_blocks
            queries = reference.summarise(x.q_BHTD, self.form.cos, self.form.q, x.first_block)
        with phase("scoring"):
            return reference.scores(x, queries, state.table.until(x.key_blocks), self.form)

    def slab_sums(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> tuple[int, SlabSums]:
        from . import kernel, summary_kernel

        with phase("anchors"):
            start = _first_missing(x, state)
            new_keys = x.k_BGSD[:, :, start * BLOCK :]
            summary_kernel.summarise(new_keys, self.form.cos, self.form.k, state.table, start, start)
            state.done = x.key_blocks
            queries = summary_kernel.empty_table(x.q_BHTD, self.form.q.cap)
            summary_kernel.summarise(x.q_BHTD, self.form.cos, self.form.q, queries, 0, x.first_block)
        return self.form.q.cap, lambda first, blocks: kernel.score_sums(
            x, queries, state.table, self.form, first, blocks
        )


def _first_missing(x: AttentionInput, state: KeyAnchors) -> int:
    """The first key block to summarise: this chunk's first, or one before it that is not there yet."""
    table = state.table
    held = (*table.count_BGMA.shape[:3], table.vector_BGMAD.shape[4])
    needed = (*x.k_BGSD.shape[:2], x.key_blocks, x.k_BGSD.shape[3])
    if held[:2] != needed[:2] or held[2] < needed[2] or held[3] != needed[3]:
        raise KernelInputError(
            f"the state was made for (batch, key heads, blocks, D) = {held}, the input needs {needed}"
        )
    if table.vector_BGMAD.dtype != x.k_BGSD.dtype or table.vector_BGMAD.device != x.k_BGSD.device:
        raise KernelInputError(
            f"the state is {table.vector_BGMAD.dtype} on {table.vector_BGMAD.device}, "
            f"k is {x.k_BGSD.dtype} on {x.k_BGSD.device}"
        )
    return min(state.done, x.first_block)
