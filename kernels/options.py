"""Options of attention methods: frozen dataclasses whose fields have bounds. They load no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from deltafront.kernels.interface import KernelInputError

Value = float | int | bool
V = TypeVar("V", bound=Value)
_KEY = "option"


@dataclass(frozen=True)
class Option:
    default: Value
    low: float
    high: float
    help: str
    choices: tuple[Value, ...] = ()


def option(default: V, low: float, high: float, help: str, choices: tuple[V, ...] = ()) -> V:
    """Make a field of an options dataclass. `methods.method_spec` enforces its inclusive bounds."""
    return field(default=default, metadata={_KEY: Option(default, low, high, help, choices)})


def options_of(form: type[Any]) -> Mapping[str, Option]:
    """Return a dataclass's options by name. Raises TypeError for a field that is not made with `option`."""
    for declared in fields(form):
        if _KEY not in declared.metadata:
            raise TypeError(f"{form.__name__}.{declared.name} is not made with `option`: it has no bounds")
    return {declared.name: declared.metadata[_KEY] for declared in fields(form)}


def min_tokens() -> int:
    return option(4096, 0, 1 << 20, "prompts of at most this many tokens use dense attention")


_TAU = 0.01, 1.0, "cumulative probability mass of the kept tiles"
_OUTSIDE = 0, 1, "count tau outside sink and window"
_SINK = 1, 1 << 20, "tokens at the start that every query attends to"
_WINDOW = 1, 1 << 20, "most recent tokens that every query attends to"


@dataclass(frozen=True)
class DenseOptions:
    """Dense attention (FlashAttention-2, Dao 2023, Algorithm 1) has no options."""


@dataclass(frozen=True)
class StreamingOptions:
    """StreamingLLM (Xiao et al. 2023), section 3.2. Tiles are kept whole: up to 127 keys more."""

    sink: int = option(128, *_SINK)
    window: int = option(2048, *_WINDOW)
    min_tokens: int = min_tokens()


@dataclass(frozen=True)
class ScoredOptions:
    """Options of methods that rank tiles by a score (XAttention, Xu et al. 2025, section 2.2).

    A request picks one of three rules. `tau` keeps this share of a row's probability mass; `outside` excludes
    sink and window from the mass. `share` keeps this share of a row's causal tiles. `density` names a level
    of the model's profile, which has a `tau` for each layer and head (`levels_outside` replaces `outside`).

    Raises:
        KernelInputError: Both `share` and `density` are given.
    """

    levels_outside: ClassVar[bool] = True
    tau: float = option(0.9, *_TAU)
    outside: bool = option(False, *_OUTSIDE)
    density: float = option(0.0, 0.0, 1.0, "a level of the model's profile, in place of tau; 0: none")
    share: float = option(0.0, 0.0, 1.0, "of each row's causal tiles to keep, in place of tau; 0: by tau")
    sink: int = option(1, *_SINK)
    window: int = option(1, *_WINDOW)
    min_tokens: int = min_tokens()

    def __post_init__(self) -> None:
        if self.share > 0 and self.density > 0:
            raise KernelInputError(
                f"share = {self.share} and density = {self.density} exclude each other: one must be 0"
            )


@dataclass(frozen=True)
class AntidiagonalOptions(ScoredOptions):
    """XAttention (Xu et al. 2025), sections 2.1-2.2."""

    stride: int = option(8, 4, 64, "antidiagonal stride S", (4, 8, 16, 64))


@dataclass(frozen=True)
class AnchorsOptions(ScoredOptions):
    """Options of `dpxa`, which scores tiles by anchor rows (DeltaAttention, section 4.3, changed as
    docs/decisions/0003 and 0008 say)."""

    tau: float = option(0.8, *_TAU)
    outside: bool = option(True, *_OUTSIDE)
    window: int = option(512, *_WINDOW)
    cos: float = option(0.4, -1.0, 1.0, "cosine at or above which a row joins its anchor's run")
    centred: bool = option(True, 0, 1, "compare rows less their block's mean, so that a bias makes no run")
    q_anchors: int = option(8, 1, 32, "query anchors per block", (1, 2, 4, 8, 16, 32))
    k_anchors: int = option(32, 8, 64, "key anchors per block", (8, 16, 32, 64))


@dataclass(frozen=True)
class RunOptions:
    """Options of runs of similar keys and their packed rows (DeltaAttention, section 4.1)."""

    cos: float = option(0.83, -1.0, 1.0, "cosine at or above which a key joins its anchor's run")
    means: bool = option(True, 0, 1, "pack the means of a run's keys and values; 0: its anchor's own")


@dataclass(frozen=True)
class DeltaKVOptions(RunOptions):
    """DeltaAttention section 4.1. The paper packs the anchors' own rows (`means=0`)."""

    critical: int = option(512, 128, 8192, "tokens before the query block that are attended exactly")
    min_tokens: int = min_tokens()


@dataclass(frozen=True)
class DeltaXAttentionOptions(RunOptions, AntidiagonalOptions):
    """DeltaAttention section 4.2: XAttention selects tiles, and those with lower scores are computed over
    packed runs. Anchors' own rows are packed, as in the paper."""

    means: bool = option(False, 0, 1, "pack the means of a run's keys and values; 0: its anchor's own")
    exact_share: float = option(0.1, 0.0, 1.0, "share of a row's kept tiles that is computed exactly")


@dataclass(frozen=True)
class CorrectionOptions:
    """Options that `+delta` adds to a method's own (Δ Attention, Willette et al. 2025, section 3)."""

    gamma: int = option(64, 1, 4096, "every gamma-th query row is computed densely")
    spread: float = option(
        1.0, 0.0, 1.0, "share of a dense row's difference that the rows after it get; 1: equation 6, 0: 5"
    )
