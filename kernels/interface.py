"""Types that selectors, backends and workers share. Importing them loads no torch.

Shape suffixes: B batch, H query heads, G key/value heads, T query rows of this chunk, S keys so far, D head
dimension, N query blocks of this chunk (pages elsewhere), M key blocks so far.

Between the chunks of a prompt, a method keeps one state per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deltafront.kernels.constants import BLOCK

if TYPE_CHECKING:
    import torch

Thresholds = Callable[[int, int], Sequence[float]]
"""(layer index in the model, prompt length in tokens) → the threshold of each query head."""


class KernelInputError(ValueError):
    """An argument that no kernel supports. Raised before any launch."""


def runs_on_cpu(x: torch.Tensor, name: str) -> bool:
    """Say whether x is on a CPU. Raises KernelInputError for any device but CPU and CUDA."""
    kind = x.device.type
    if kind not in ("cpu", "cuda"):
        raise KernelInputError(f"{name}: runs on cpu or cuda tensors, not on {kind}")
    return kind == "cpu"


@dataclass(frozen=True)
class StateSpec:
    """The layer and prompt that a state is made for.

    Attributes:
        max_tokens: Tokens of the whole prompt.
        layer: The layer's index in the model.
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
    """One chunk of queries, and the keys and values of all tokens so far. Attention is causal.

    Query head h reads key head h // (H // G). The head dimension is contiguous.

    Attributes:
        q_BHTD: Positions q_start .. q_start + T - 1.
        k_BGSD, v_BGSD: Positions 0 .. S - 1, S = q_start + T.
        q_start: A multiple of BLOCK for every method but `dense`.
        prompt_tokens: Tokens of the whole prompt.
        scale: Factor of q · k.
        sink_H: Each query head's attention sink: a logit that takes part in the softmax and has no value
            (gpt-oss). None: no sinks.
    """

    q_BHTD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    q_start: int
    prompt_tokens: int
    scale: float
    sink_H: torch.Tensor | None = None

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
        sink_H: torch.Tensor | None = None,
    ) -> AttentionInput:
        """Check tensors and fill in defaults. Raises KernelInputError.

        Args:
            q_start: None: the queries are the last T positions.
            prompt_tokens: None: this chunk is the prompt's last.
            scale: None: 1 / sqrt(D).
        """
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
        if sink_H is not None and sink_H.shape != q_BHTD.shape[1:2]:
            raise KernelInputError(
                f"sinks {tuple(sink_H.shape)} are not one of each of {q_BHTD.shape[1]} heads"
            )
        return cls(q_BHTD, k_BGSD, v_BGSD, start, total, factor, sink_H)

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
        """Absolute index of this chunk's first query block."""
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
    """The key blocks that each query block attends to.

    Attributes:
        index_BHNM: int16, ascending absolute key blocks; entries past the count are undefined.
        count_BHN: int32, at least 1: block 0 and the diagonal are always kept.
        score_BHNM: float32, the tiles' scores. None unless the selector was made `with_scores`.
    """

    index_BHNM: torch.Tensor
    count_BHN: torch.Tensor
    score_BHNM: torch.Tensor | None = None


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one attention call, summed over batch and heads.

    Attributes:
        computed: Tiles computed, as a scalar on the device; reading it synchronises.
        causal: All causal tiles.
        scored_share: The share of a tile's q · k dot products that its score is computed from.
    """

    computed: torch.Tensor
    causal: int
    scored_share: float


Phase = Callable[[str], AbstractContextManager[object]]
"""`with phase("scoring"):` attributes the time inside to a phase: anchors, scoring, selection, attention or
correction. It never waits for the device."""


def no_phase(_name: str) -> AbstractContextManager[object]:
    return nullcontext()


class Selector(Protocol):
    scored_share: float

    def new_state(self, spec: StateSpec) -> Any: ...

    def select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask: ...


class AttentionBackend(Protocol):
    """Computes attention over a mask's tiles, on a CPU or by kernels. Without a mask the backend chooses the
    keys, usually all causal keys. `attend` returns out_BHTD in q's dtype."""

    def new_state(self, spec: StateSpec) -> Any: ...

    def attend(self, x: AttentionInput, mask: TileMask | None, state: Any, phase: Phase) -> torch.Tensor: ...

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: Any) -> torch.Tensor:
        """Count the q · k dot products of `attend`, in tiles: a float64 scalar on x's device."""


class Attention(Protocol):
    """An attention method, called by the layers.

    Each chunk comes with the keys of all tokens so far, so a new state may start in the middle of a prompt.
    A method registered `from_keys` then computes the same bits as with the old state, if the new one starts
    at a multiple of `methods.resume_step`. The prompt's length changes the output of the first
    `methods.lasting_tokens` rows only through thresholds and the option `min_tokens`.
    """

    def new_state(self, spec: StateSpec) -> Any: ...

    def attend(
        self, x: AttentionInput, state: Any, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]: ...
