"""What selectors, executors and wrappers agree on.

Shape suffixes: B batch, H query heads, G key/value heads, T query rows of this chunk, S keys so far,
D head dimension, N query blocks of this chunk, M key blocks so far.

A *method* is selector × executor × wrapper (see `methods.py` for the named ones and `build.py` for how
they are put together). Every method sees one chunk of queries against all keys so far; what it must
remember between chunks of one prompt lives in the state it made with `new_state`, one per layer.

Free of torch until a tensor is looked at, as are the modules that define methods: the front door reads their
options without loading it. So they import torch, and the modules that need it, inside their functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .constants import BLOCK

if TYPE_CHECKING:
    import torch

Thresholds = Callable[[int, int], Sequence[float]]
"""(absolute layer, tokens of the whole prompt) -> what a selection rule aims at there (`Rule.threshold`), one
number per query head."""


class KernelInputError(ValueError):
    """An argument that no kernel can work with; raised before anything is launched."""


def runs_on_cpu(x: torch.Tensor, name: str) -> bool:
    """True: the CPU form runs; False: the CUDA kernel. Any other device raises."""
    kind = x.device.type
    if kind not in ("cpu", "cuda"):
        raise KernelInputError(f"{name}: runs on cpu or cuda tensors, not on {kind}")
    return kind == "cpu"


@dataclass(frozen=True)
class StateSpec:
    """What a method needs to know to allocate its state for one layer of one prompt.

    max_tokens: of the whole prompt. layer: its absolute index in the model.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    device: torch.device
    dtype: torch.dtype
    layer: int = 0


@dataclass(frozen=True)
class AttentionInput:
    """One chunk of queries against all keys so far, causal.

    q_BHTD: rows are the absolute positions q_start .. q_start+T-1. k_BGSD, v_BGSD: positions 0 .. S-1
    with S == q_start + T. H is a multiple of G (query head h reads key head h // (H // G)). The innermost
    dimension is contiguous; outer strides are free. q_start is a multiple of BLOCK for every method but
    `dense`. prompt_tokens is the length of the whole prompt, of which this chunk may be a part.
    """

    q_BHTD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    q_start: int
    prompt_tokens: int
    scale: float

    @classmethod
    def of(
        cls,
        q_BHTD: torch.Tensor,
        k_BGSD: torch.Tensor,
        v_BGSD: torch.Tensor,
        *,
        q_start: int | None = None,
        prompt_tokens: int | None = None,
        scale: float | None = None,
    ) -> AttentionInput:
        """Fill the defaults (last rows of the keys; chunk ends the prompt; 1/sqrt(D)) and check all."""
        _check_tensors(q_BHTD, k_BGSD, v_BGSD)
        keys, rows = k_BGSD.shape[2], q_BHTD.shape[2]
        start = keys - rows if q_start is None else q_start
        if start < 0 or start + rows != keys:
            raise KernelInputError(
                f"keys must end where the queries end: q_start {start} + {rows} rows != {keys} keys"
            )
        total = keys if prompt_tokens is None else prompt_tokens
        if total < keys:
            raise KernelInputError(f"prompt_tokens {total} is less than the {keys} keys given")
        factor = q_BHTD.shape[3] ** -0.5 if scale is None else scale
        return cls(q_BHTD, k_BGSD, v_BGSD, start, total, factor)

    @property
    def group(self) -> int:
        return self.q_BHTD.shape[1] // self.k_BGSD.shape[1]

    @property
    def query_blocks(self) -> int:
        return -(-self.q_BHTD.shape[2] // BLOCK)

    @property
    def key_blocks(self) -> int:
        return -(-self.k_BGSD.shape[2] // BLOCK)

    @property
    def first_block(self) -> int:
        """Absolute index of this chunk's first query block (and of its diagonal key block)."""
        return self.q_start // BLOCK

    def require_aligned(self, method: str) -> None:
        if self.q_start % BLOCK:
            raise KernelInputError(f"{method}: q_start {self.q_start} is not a multiple of {BLOCK}")


def _check_tensors(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
    for name, x in (("q", q_BHTD), ("k", k_BGSD), ("v", v_BGSD)):
        if x.dim() != 4:
            raise KernelInputError(f"{name} must have 4 dimensions (batch, heads, tokens, D), got {x.dim()}")
        if x.numel() == 0:
            raise KernelInputError(f"{name} is empty: shape {tuple(x.shape)}")
        if x.stride(3) != 1:
            raise KernelInputError(f"{name}: the head dimension must be contiguous, stride is {x.stride(3)}")
        if not x.is_floating_point() or x.element_size() not in (2, 4):
            raise KernelInputError(f"{name}: dtype {x.dtype} is not float32, float16 or bfloat16")
        if x.dtype != q_BHTD.dtype or x.device != q_BHTD.device:
            raise KernelInputError(
                f"{name} is {x.dtype} on {x.device}, but q is {q_BHTD.dtype} on {q_BHTD.device}"
            )
    if k_BGSD.shape != v_BGSD.shape:
        raise KernelInputError(f"k {tuple(k_BGSD.shape)} and v {tuple(v_BGSD.shape)} differ")
    if q_BHTD.shape[0] != k_BGSD.shape[0] or q_BHTD.shape[3] != k_BGSD.shape[3]:
        raise KernelInputError(f"q {tuple(q_BHTD.shape)} and k {tuple(k_BGSD.shape)}: batch or D differ")
    if q_BHTD.shape[1] % k_BGSD.shape[1]:
        raise KernelInputError(
            f"{q_BHTD.shape[1]} query heads on {k_BGSD.shape[1]} key heads: not a multiple"
        )


@dataclass(frozen=True)
class TileMask:
    """Which key blocks each query block attends to.

    index_BHNM: int16, ascending absolute key blocks of each query block, first `count` entries valid and
    the rest undefined. count_BHN: int32, at least 1 (the diagonal is always there; so is block 0).
    score_BHNM: float32, the selector's estimate of each listed tile's mass, laid out as index_BHNM; None
    unless the selector was made `with_scores` (the `block_sparse_packed` executor ranks by them).
    """

    index_BHNM: torch.Tensor
    count_BHN: torch.Tensor
    score_BHNM: torch.Tensor | None = None


@dataclass(frozen=True)
class Coverage:
    """How much of the causal triangle a call computed; device tensors, to be read late.

    computed, causal: tiles, summed over batch and heads. sampled: share of a tile's q·k products that
    scoring looked at (0 where nothing is scored).
    """

    computed: torch.Tensor
    causal: int
    sampled: float


Phase = Callable[[str], AbstractContextManager[object]]
"""`with phase("scoring"):` marks what the time inside is spent on. Names: anchors, scoring, selection,
attention, correction. On CUDA an implementation records events; it never synchronises."""


def no_phase(_name: str) -> AbstractContextManager[object]:
    return nullcontext()


class Selector(Protocol):
    """Looks at q and k and says which tiles matter."""

    sampled: float

    def new_state(self, spec: StateSpec) -> Any:
        """What is carried from chunk to chunk of one layer (None where nothing is)."""

    def select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask: ...


class Executor(Protocol):
    """Computes attention over a mask (None: everything causal). Returns out_BHTD, q's dtype."""

    def new_state(self, spec: StateSpec) -> Any: ...

    def attend(self, x: AttentionInput, mask: TileMask | None, state: Any, phase: Phase) -> torch.Tensor: ...

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: Any) -> torch.Tensor:
        """Tiles' worth of q·k products that `attend` did, a float64 scalar on x's device."""


class Attention(Protocol):
    """A whole method, as the workers call it.

    A prompt whose chunks were computed elsewhere up to some point goes on here with a new state: the next
    chunk brings the keys of all tokens so far. A method that is registered `from_keys` then computes, to the
    bit, what it would have with the state of the chunks before, so it makes up for what its state lacks.
    """

    def new_state(self, spec: StateSpec) -> Any: ...

    def attend(
        self, x: AttentionInput, state: Any, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, Coverage]: ...
