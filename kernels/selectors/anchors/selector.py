"""The selector of DPXA (DeltaAttention, section 4.3), with a limited number of anchors per block."""

from dataclasses import dataclass

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, Phase, StateSpec
from deltafront.kernels.options import AnchorsOptions
from deltafront.kernels.selectors.anchors.cpu import cpu_scores, cpu_summarise
from deltafront.kernels.selectors.anchors.form import AnchorSettings, BlockAnchors, SideSettings
from deltafront.kernels.selectors.anchors.scores import score_sums
from deltafront.kernels.selectors.anchors.summary import empty_table, kernel_summarise
from deltafront.kernels.selectors.scored import ScoredState, SlabSelector, SlabSums

_K_RELAX = 0.15


@dataclass
class KeyAnchors(ScoredState):
    """A layer's selection rule and the anchor slots of its keys. The first `done` of the prompt's `blocks`
    key blocks have filled slots."""

    table: BlockAnchors
    blocks: int
    done: int = 0

    def runs_a_block(self) -> float | None:
        """Return the mean number of filled slots of a key block; None before the first block."""
        filled_BGM = (self.table.count_BGMA[:, :, : self.done] > 0).sum(-1)
        return float(filled_BGM.float().mean()) if self.done else None


class AnchorsSelector(SlabSelector):
    name = "anchors"

    def __init__(self, options: AnchorsOptions) -> None:
        super().__init__(options)
        self.form = AnchorSettings(
            cos=options.cos,
            q=SideSettings(options.q_anchors),
            k=SideSettings(options.k_anchors, _K_RELAX),
            centred=options.centred,
        )
        self.scored_share = self.form.q.cap * self.form.k.cap / BLOCK**2

    def new_state(self, spec: StateSpec) -> KeyAnchors:
        blocks = -(-spec.max_tokens // BLOCK)
        tiles = -(-blocks * self.form.k.cap // BLOCK)
        shape = (spec.batch, spec.kv_heads, tiles * BLOCK // self.form.k.cap, self.form.k.cap)
        table = BlockAnchors(
            vector_BGMAD=torch.zeros(*shape, spec.head_dim, dtype=spec.dtype, device=spec.device),
            first_BGMA=torch.zeros(shape, dtype=torch.int32, device=spec.device),
            count_BGMA=torch.zeros(shape, dtype=torch.float32, device=spec.device),
        )
        return KeyAnchors(self.layer_rule(spec), table, blocks)

    def cpu_scores(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> torch.Tensor:
        with phase("anchors"):
            start = _first_missing(x, state)
            new = cpu_summarise(x.k_BGSD[:, :, start * BLOCK :], self.form, self.form.k, start)
            state.table.vector_BGMAD[:, :, start : x.key_blocks] = new.vector_BGMAD.to(x.k_BGSD.dtype)
            state.table.first_BGMA[:, :, start : x.key_blocks] = new.first_BGMA
            state.table.count_BGMA[:, :, start : x.key_blocks] = new.count_BGMA
            state.done = x.key_blocks
            queries = cpu_summarise(x.q_BHTD, self.form, self.form.q, x.first_block)
        with phase("scoring"):
            return cpu_scores(x, queries, state.table.until(x.key_blocks))

    def slab_sums(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> tuple[int, SlabSums]:
        with phase("anchors"):
            start = _first_missing(x, state)
            new_keys = x.k_BGSD[:, :, start * BLOCK :]
            kernel_summarise(new_keys, self.form, self.form.k, state.table, start, start)
            state.done = x.key_blocks
            queries = empty_table(x.q_BHTD, self.form.q.cap)
            kernel_summarise(x.q_BHTD, self.form, self.form.q, queries, 0, x.first_block)
        return self.form.q.cap, lambda first, blocks: score_sums(
            x, queries, state.table, self.form, first, blocks
        )


def _first_missing(x: AttentionInput, state: KeyAnchors) -> int:
    """Return the first key block whose slots to fill: this chunk's first, or an earlier one without slots."""
    table = state.table
    made_for = (*table.count_BGMA.shape[:2], state.blocks, table.vector_BGMAD.shape[4])
    needed = (*x.k_BGSD.shape[:2], x.key_blocks, x.k_BGSD.shape[3])
    if made_for[:2] != needed[:2] or made_for[2] < needed[2] or made_for[3] != needed[3]:
        raise KernelInputError(
            f"the state was made for (batch, key heads, blocks, D) = {made_for}, the input needs {needed}"
        )
    if table.vector_BGMAD.dtype != x.k_BGSD.dtype or table.vector_BGMAD.device != x.k_BGSD.device:
        raise KernelInputError(
            f"the state is for {table.vector_BGMAD.dtype} on {table.vector_BGMAD.device}, "
            f"k is {x.k_BGSD.dtype} on {x.k_BGSD.device}"
        )
    return min(state.done, x.first_block)
