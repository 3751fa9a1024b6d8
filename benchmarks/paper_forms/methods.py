"""Registers the methods of this package. It must not import torch, because the API server may import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.methods import register
from deltafront.kernels.options import (
    AntidiagonalOptions,
    DeltaXAttentionOptions,
    RunOptions,
    ScoredOptions,
    StreamingOptions,
    min_tokens,
    option,
)

_SPARSE = "deltafront.kernels.attention.block_sparse:BlockSparseBackend"


@dataclass(frozen=True)
class PhaseOptions:
    """Options of Delta-KV in two phases (DeltaAttention, section 4.1.4). Packed rows are the anchors' own.

    Raises:
        KernelInputError: Both phases are switched off.
    """

    counts: bool = option(True, 0, 1, "weigh an anchor by the length of its run (Table 4)")
    block: int = option(128, 64, 128, "anchors of a packed block, safe together", (64, 128))
    history: bool = option(True, 0, 1, "phase 1, packed keys; 0: only exact keys (Table 6)")
    diagonal: bool = option(True, 0, 1, "phase 2, exact keys; 0: packed ones up to the query (Table 5)")
    min_tokens: int = min_tokens()

    def __post_init__(self) -> None:
        if not (self.history or self.diagonal):
            raise KernelInputError("history = 0 and diagonal = 0 leave nothing to attend to")


@dataclass(frozen=True)
class DeltaKVThesisOptions(PhaseOptions):
    """Anchors by similarity, in chunks of 512 keys (DeltaAttention, section 4.1.1)."""

    cos: float = option(0.83, -1.0, 1.0, "cosine at or above which a key joins its anchor's run")
    distance: float = option(
        0.0, 0.0, 1e6, "Euclidean distance up to which a key joins its run; 0: by cosine"
    )


@dataclass(frozen=True)
class DeltaKVPeriodicOptions(PhaseOptions):
    """Every n-th key is an anchor (DeltaAttention, Table 7)."""

    every: int = option(2, 1, 512, "tokens from one anchor to the next")


@dataclass(frozen=True)
class DeltaKVRandomOptions(PhaseOptions):
    """Random anchors (DeltaAttention, Table 7)."""

    keep: float = option(0.5, 0.01, 1.0, "share of the keys that are anchors")
    seed: int = option(0, 0, 1 << 30, "of the choice, with the layer's number")


_SECTION = "DeltaAttention section 4.1"
_DELTA_KV = f"{__package__}.delta_kv"
register(
    "delta_kv_thesis", DeltaKVThesisOptions, None, f"{_DELTA_KV}:SimilarKeys", source=_SECTION, from_keys=True
)
register(
    "delta_kv_periodic", DeltaKVPeriodicOptions, None, f"{_DELTA_KV}:PeriodicKeys", source=_SECTION,
    from_keys=True,
)  # fmt: skip
register(
    "delta_kv_random", DeltaKVRandomOptions, None, f"{_DELTA_KV}:RandomKeys", source=_SECTION, from_keys=True
)


@dataclass(frozen=True)
class AllPackedOptions(RunOptions, AntidiagonalOptions):
    """XAttention's tiles, all packed, even the diagonal (DeltaAttention, Table 8)."""


@dataclass(frozen=True)
class TileSkipOptions(DeltaXAttentionOptions):
    """XAttention without its lowest-scored tiles. It drops the number of tiles that `delta_xattention` with
    these options would save (DeltaAttention, section 4.2.2)."""

    skip: float = option(0.0, 0.0, 1.0, "share of the keys to save; 0: what packing would save")


_SECTION = "DeltaAttention section 4.2"
_SCORING = "deltafront.kernels.selectors.grouped.antidiagonal:scoring_selector"
_TILES = f"{__package__}.delta_xattention"
register("delta_xattention_all_packed", AllPackedOptions, _SCORING, f"{_TILES}:AllPacked", source=_SECTION)
register(
    "xattention_skip", TileSkipOptions, f"{_TILES}:TileSkipSelector",
    _SPARSE, source=_SECTION,
)  # fmt: skip


@dataclass(frozen=True)
class XAttentionPaperOptions(AntidiagonalOptions):
    """XAttention's ablations. A profile's thresholds include the mass of sink and window, as in the paper."""

    levels_outside: ClassVar[bool] = False
    pattern: int = option(0, 0, 2, "pairs in a cell: 0 antidiagonal, 1 diagonal, 2 random", (0, 1, 2))
    seed: int = option(0, 0, 1 << 30, "of random pairs")
    top: int = option(0, 0, 1 << 16, "tiles of a row beside sink and window, in place of tau; 0: by tau")


@dataclass(frozen=True)
class ThesisAnchorsOptions(ScoredOptions):
    """DPXA as in DeltaAttention, section 4.3. Every anchor of q and k is kept and has weight 1. All scores of
    a query block are divided by one sum. A profile's thresholds include the mass of sink and
    window."""

    levels_outside: ClassVar[bool] = False
    cos: float = option(0.75, -1.0, 1.0, "cosine at or above which a row joins its anchor's run")


@dataclass(frozen=True)
class NaiveCellsOptions(ScoredOptions):
    """Scores like `dpxa_thesis`, from every n-th row of q and k (ablation of DeltaAttention, section 4.3)."""

    every: int = option(3, 1, 64, "every n-th row of q and k is scored")


_TILES = f"{__package__}.tile_scores"
register(
    "xattention_paper", XAttentionPaperOptions, f"{_TILES}:PairedSelector", _SPARSE,
    source="XAttention (Xu et al. 2025), its ablation study", from_keys=True,
)  # fmt: skip
register(
    "dpxa_thesis", ThesisAnchorsOptions, f"{_TILES}:ThesisAnchorsSelector", _SPARSE,
    source="DeltaAttention section 4.3", from_keys=True,
)  # fmt: skip
register(
    "naive_cells", NaiveCellsOptions, f"{_TILES}:NaiveCellsSelector", _SPARSE,
    source="DeltaAttention, ablation of section 4.3", from_keys=True,
)  # fmt: skip


@dataclass(frozen=True)
class BlockPoolOptions(ScoredOptions):
    """Scores from block means, as for MInference's block-sparse heads (Jiang et al. 2024, Algorithm 3)."""


@dataclass(frozen=True)
class BlockTopOptions(BlockPoolOptions):
    """MInference's block-sparse pattern (Jiang et al. 2024, Algorithm 3). Blocks: 128 tokens, not 64."""

    top: int = option(50, 1, 1 << 16, "blocks of 128 tokens of a row, beside sink and window")


@dataclass(frozen=True)
class SpargeOptions:
    """SpargeAttn's first stage (Zhang et al. 2025, section 3.2). Defaults are those of the authors' code."""

    tau: float = option(0.98, 0.01, 1.0, "mass of the compressed attention up to which blocks are kept")
    theta: float = option(0.6, -1.0, 1.0, "mean cosine within a block up to which it is never skipped")
    min_tokens: int = min_tokens()


_BASELINES = f"{__package__}.baselines"
register(
    "block_pool", BlockPoolOptions, f"{_BASELINES}:BlockPoolSelector", _SPARSE,
    source="block mean pooling", from_keys=True,
)  # fmt: skip
register(
    "minference_block_sparse", BlockTopOptions, f"{_BASELINES}:BlockTopSelector", _SPARSE,
    source="MInference (Jiang et al. 2024), Algorithm 3", from_keys=True,
)  # fmt: skip
register(
    "sparge", SpargeOptions, f"{_BASELINES}:SpargeSelector", _SPARSE,
    source="SpargeAttn (Zhang et al. 2025), section 3.2", from_keys=True,
)  # fmt: skip


@dataclass(frozen=True)
class StreamingSmoothedOptions(StreamingOptions):
    """The Δ correction with smoothed differences (Δ Attention, appendices C and J)."""

    gamma: int = option(64, 1, 4096, "every gamma-th query row is computed densely")
    linear: bool = option(False, 0, 1, "mix each difference with the next one, in place of the filter")
    alpha: float = option(1.0, 0.0, 1.0, "how far the filter follows a difference; its only number: EMA")
    beta: float = option(0.0, 0.0, 1.0, "the same of its velocity")
    acceleration: float = option(0.0, 0.0, 1.0, "the same of its acceleration")
    paper_end: bool = option(
        False, 0, 1, "dense rows at the end: only what makes the rest divisible by gamma; 0: a block and more"
    )


register(
    "streaming_smoothed", StreamingSmoothedOptions,
    "deltafront.kernels.selectors.streaming:StreamingSelector",
    f"{__package__}.delta_smoothed:SmoothedBackend", source="Δ Attention, appendices C and J",
    whole_prompt=True,
)  # fmt: skip
