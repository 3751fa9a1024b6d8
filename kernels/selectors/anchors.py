"""Query anchors against key anchors: our bounded form of DPXA. On the CPU in `anchors_cpu.py`.

Shape suffixes as in `kernels.interface`; A anchor slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..constants import BLOCK
from ..executors.block_sparse import BlockSparseExecutor
from ..interface import AttentionInput, KernelInputError, Phase, StateSpec
from ..methods import register
from ..options import option
from .scored import ScoredOptions, ScoredSelector, ScoredState, SlabSums, outside, tau, window

if TYPE_CHECKING:
    import torch

Representative = Literal["mean", "anchor"]
Overflow = Literal["merge", "drop"]


@dataclass(frozen=True)
class AnchorsOptions(ScoredOptions):
    """DPXA (DeltaAttention, section 4.3) in our bounded form; docs/decisions/0003 says what differs, 0008 why
    the quota counts the mass outside sink and window."""

    tau: float = tau(0.8)
    outside: bool = outside(True)
    window: int = window(512)
    cos: float = option(0.75, -1.0, 1.0, "cosine at or above which a row joins its anchor's run")
    q_anchors: int = option(8, 1, 32, "query anchors per block", (1, 2, 4, 8, 16, 32))
    k_anchors: int = option(32, 8, 64, "key anchors per block", (8, 16, 32, 64))
    largest: bool = option(False, 0, 1, "score a tile by the query anchor that needs it most")


@dataclass(frozen=True)
class SideSettings:
    """How one side (q or k) of a block is summarised.

    cap: slots per block, a power of two up to 128. representative: what a slot holds, the mean of its rows
    or the run's first row. overflow: where a block has more runs than slots, runs floor(i * runs / cap)
    are picked; the runs between two picks join the earlier one (merge) or are left out (drop).
    relax: a block with more runs than slots is scanned again with the cosine lowered by this much, before
    anything is picked; None: it is not.
    """

    cap: int
    representative: Representative
    overflow: Overflow
    relax: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.cap <= BLOCK or self.cap & (self.cap - 1):
            raise KernelInputError(
                f"anchors per block must be a power of two within 1 .. 128, got {self.cap}"
            )
        if self.representative not in ("mean", "anchor"):
            raise KernelInputError(f"representative {self.representative!r} is not 'mean' or 'anchor'")
        if self.overflow not in ("merge", "drop"):
            raise KernelInputError(f"overflow {self.overflow!r} is not 'merge' or 'drop'")


@dataclass(frozen=True)
class AnchorSettings:
    """The anchor selector's form.

    cos: cosine at or above which a row joins a run. weighted: count a key slot once per row it stands for.
    row_normalised: every query anchor's scores sum to 1 before they are added; otherwise all cells of a
    query block share one normaliser, as in the thesis. largest: a tile's score is that of the query anchor
    that gives it most, in place of their sum.
    """

    cos: float
    q: SideSettings
    k: SideSettings
    weighted: bool = True
    row_normalised: bool = True
    largest: bool = False


@dataclass(frozen=True)
class BlockAnchors:
    """The slots of consecutive blocks.

    vector_BGMAD: what each slot stands for. first_BGMA: int32, absolute position of its first row.
    count_BGMA: float32, rows it stands for; 0 where the slot is empty, and then its vector
    means nothing.
    """

    vector_BGMAD: torch.Tensor
    first_BGMA: torch.Tensor
    count_BGMA: torch.Tensor

    def until(self, block: int) -> BlockAnchors:
        """The blocks before `block`."""
        return BlockAnchors(
            self.vector_BGMAD[:, :, :block], self.first_BGMA[:, :, :block], self.count_BGMA[:, :, :block]
        )


@dataclass
class KeyAnchors(ScoredState):
    """Also the key side of the layer, filled block by block: `done` of its `blocks` hold their slots. The
    table has whole tiles of 128 slots, which the Hopper kernel copies. dtype: of the keys."""

    dtype: torch.dtype
    table: BlockAnchors
    blocks: int
    done: int = 0


class AnchorsSelector(ScoredSelector):
    """The keyword arguments open the rest of the form (see `SideSettings` and `AnchorSettings`).

    The thesis's own: q_anchors = k_anchors = 128, k_relax None, weighted and row_normalised False.
    """

    name = "anchors"

    def __init__(
        self,
        options: AnchorsOptions,
        *,
        q_representative: Representative = "anchor",
        k_representative: Representative = "anchor",
        q_overflow: Overflow = "drop",
        k_overflow: Overflow = "drop",
        k_relax: float | None = 0.15,
        weighted: bool = True,
        row_normalised: bool = True,
    ) -> None:
        super().__init__(options.rule)
        self.form = AnchorSettings(
            cos=options.cos,
            q=SideSettings(options.q_anchors, q_representative, q_overflow),
            k=SideSettings(options.k_anchors, k_representative, k_overflow, k_relax),
            weighted=weighted,
            row_normalised=row_normalised,
            largest=options.largest,
        )
        self.sampled = self.form.q.cap * self.form.k.cap / BLOCK**2

    def new_state(self, spec: StateSpec) -> KeyAnchors:
        import torch

        blocks = -(-spec.max_tokens // BLOCK)
        tiles = -(-blocks * self.form.k.cap // BLOCK)
        shape = (spec.batch, spec.kv_heads, tiles * BLOCK // self.form.k.cap, self.form.k.cap)
        table = BlockAnchors(
            vector_BGMAD=torch.zeros(*shape, spec.head_dim, dtype=self._slot_dtype(spec), device=spec.device),
            first_BGMA=torch.zeros(shape, dtype=torch.int32, device=spec.device),
            count_BGMA=torch.zeros(shape, dtype=torch.float32, device=spec.device),
        )
        return KeyAnchors(self.rule_of(spec), spec.dtype, table, blocks)

    def _slot_dtype(self, spec: StateSpec) -> torch.dtype:
        if spec.device.type != "cuda":
            return spec.dtype
        from .anchors_kernel import slot_dtype

        return slot_dtype(spec.device, spec.dtype, spec.head_dim, self.form)

    def cpu_scores(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> torch.Tensor:
        from .anchors_cpu import cpu_scores, cpu_summarise

        with phase("anchors"):
            start = _first_missing(x, state)
            new = cpu_summarise(x.k_BGSD[:, :, start * BLOCK :], self.form.cos, self.form.k, start)
            state.table.vector_BGMAD[:, :, start : x.key_blocks] = new.vector_BGMAD.to(x.k_BGSD.dtype)
            state.table.first_BGMA[:, :, start : x.key_blocks] = new.first_BGMA
            state.table.count_BGMA[:, :, start : x.key_blocks] = new.count_BGMA
            state.done = x.key_blocks
            queries = cpu_summarise(x.q_BHTD, self.form.cos, self.form.q, x.first_block)
        with phase("scoring"):
            return cpu_scores(x, queries, state.table.until(x.key_blocks), self.form)

    def slab_sums(self, x: AttentionInput, state: KeyAnchors, phase: Phase) -> tuple[int, SlabSums]:
        from .anchors_kernel import score_sums
        from .anchors_summary_kernel import empty_table, kernel_summarise

        with phase("anchors"):
            start = _first_missing(x, state)
            new_keys = x.k_BGSD[:, :, start * BLOCK :]
            kernel_summarise(new_keys, self.form.cos, self.form.k, state.table, start, start)
            state.done = x.key_blocks
            queries = empty_table(x.q_BHTD, self.form.q.cap, state.table.vector_BGMAD.dtype)
            kernel_summarise(x.q_BHTD, self.form.cos, self.form.q, queries, 0, x.first_block)
        return self.form.q.cap, lambda first, blocks: score_sums(
            x, queries, state.table, self.form, first, blocks
        )


def _first_missing(x: AttentionInput, state: KeyAnchors) -> int:
    """The first key block to summarise: this chunk's first, or one before it that is not there yet."""
    table = state.table
    made_for = (*table.count_BGMA.shape[:2], state.blocks, table.vector_BGMAD.shape[4])
    needed = (*x.k_BGSD.shape[:2], x.key_blocks, x.k_BGSD.shape[3])
    if made_for[:2] != needed[:2] or made_for[2] < needed[2] or made_for[3] != needed[3]:
        raise KernelInputError(
            f"the state was made for (batch, key heads, blocks, D) = {made_for}, the input needs {needed}"
        )
    if state.dtype != x.k_BGSD.dtype or table.vector_BGMAD.device != x.k_BGSD.device:
        raise KernelInputError(
            f"the state is for {state.dtype} on {table.vector_BGMAD.device}, "
            f"k is {x.k_BGSD.dtype} on {x.k_BGSD.device}"
        )
    return min(state.done, x.first_block)


register(
    "dpxa",
    AnchorsOptions,
    AnchorsSelector,
    BlockSparseExecutor,
    source="DeltaAttention section 4.3, with the changes of docs/decisions/0003",
    from_keys=True,
)
