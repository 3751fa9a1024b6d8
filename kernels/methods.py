"""The named attention methods, as data: what each is made of and which options it takes.

Free of torch, so that the front door can check a request's method without loading it; `build.py` turns a
`MethodSpec` into something that runs. Appending `+delta` to any name wraps it in the Δ correction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = float | int | bool


class MethodError(ValueError):
    """An unknown method, or an option it does not take; `field` names the offender."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name


@dataclass(frozen=True)
class Option:
    """One option: its default, its bounds (inclusive) or its choices, and what it means."""

    default: Value
    low: float
    high: float
    help: str
    choices: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Preset:
    """One row of the table: a composition and where it was published."""

    selector: str | None
    executor: str
    options: Mapping[str, Option]
    source: str


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options filled in. Hashable by name and options; crosses processes."""

    name: str
    selector: str | None
    executor: str
    correction: bool
    options: tuple[tuple[str, Value], ...] = field(default=())

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.options)


_TAU = Option(0.9, 0.01, 1.0, "cumulative probability mass of the kept tiles")
_MIN_TOKENS = Option(4096, 0, 1 << 20, "prompts of at most this many tokens use dense attention")
_PACK = {
    "cos": Option(0.83, -1.0, 1.0, "cosine at or above which a key joins its anchor's run"),
    "counts": Option(True, 0, 1, "weigh an anchor by the length of its run"),
    "critical": Option(512, 128, 8192, "tokens before the query block that are attended exactly"),
}
_DELTA = {"gamma": Option(64, 1, 4096, "every gamma-th query row is computed densely")}

PRESETS: Mapping[str, Preset] = {
    "dense": Preset(None, "dense", {}, "FlashAttention-2"),
    "streaming": Preset(
        "streaming",
        "block_sparse",
        {
            "sink": Option(128, 1, 1 << 20, "tokens at the start that every query attends to"),
            "window": Option(2048, 1, 1 << 20, "most recent tokens that every query attends to"),
            "min_tokens": _MIN_TOKENS,
        },
        "StreamingLLM (Xiao et al. 2023), section 3.2",
    ),
    "xattention": Preset(
        "antidiagonal",
        "block_sparse",
        {
            "tau": _TAU,
            "stride": Option(8, 4, 16, "antidiagonal stride S", (4, 8, 16)),
            "min_tokens": _MIN_TOKENS,
        },
        "XAttention (Xu et al. 2025), sections 2.1-2.2",
    ),
    "dpxa": Preset(
        "anchors",
        "block_sparse",
        {
            "tau": Option(0.95, 0.01, 1.0, _TAU.help),
            "cos": Option(0.75, -1.0, 1.0, "cosine at or above which a row joins its anchor's run"),
            "q_anchors": Option(8, 1, 32, "query anchors per block", (1, 2, 4, 8, 16, 32)),
            "k_anchors": Option(32, 8, 32, "key anchors per block", (8, 16, 32)),
            "min_tokens": _MIN_TOKENS,
        },
        "DeltaAttention section 4.3, with the changes of docs/decisions/0003",
    ),
    "delta_kv": Preset(None, "packed_kv", {**_PACK, "min_tokens": _MIN_TOKENS}, "DeltaAttention section 4.1"),
    "delta_xattention": Preset(
        "antidiagonal",
        "block_sparse_packed",
        {
            "tau": _TAU,
            "stride": Option(8, 4, 16, "antidiagonal stride S", (4, 8, 16)),
            "cos": _PACK["cos"],
            "exact_share": Option(0.1, 0.0, 1.0, "share of a row's kept tiles that is computed exactly"),
            "min_tokens": _MIN_TOKENS,
        },
        "DeltaAttention section 4.2",
    ),
    "naive": Preset(
        "naive",
        "block_sparse",
        {
            "tau": _TAU,
            "stride": Option(4, 2, 16, "every stride-th row of q and k is scored", (2, 4, 8, 16)),
            "min_tokens": _MIN_TOKENS,
        },
        "DeltaAttention, ablation of section 4.3",
    ),
    "block_pool": Preset(
        "block_pool", "block_sparse", {"tau": _TAU, "min_tokens": _MIN_TOKENS}, "block mean pooling"
    ),
    "vertical_slash": Preset(
        "vertical_slash",
        "block_sparse",
        {
            "verticals": Option(1000, 1, 1 << 16, "vertical lines kept"),
            "slashes": Option(4096, 1, 1 << 16, "slash lines kept"),
            "min_tokens": _MIN_TOKENS,
        },
        "MInference (Jiang et al. 2024), Algorithm 2; whole prompt only",
    ),
    "flex": Preset(
        "flex",
        "block_sparse",
        {
            "gamma_flex": Option(0.9, 0.01, 1.0, "cumulative attention mass kept"),
            "tau_flex": Option(0.1, 0.0, 1.0, "Jensen-Shannon threshold for query-aware heads"),
            "min_tokens": _MIN_TOKENS,
        },
        "FlexPrefill (Lai et al. 2025), Algorithms 1-4; whole prompt only",
    ),
}

WHOLE_PROMPT_ONLY = frozenset({"vertical_slash", "flex"})
"""Baselines that estimate from the prompt's last queries: wrong per chunk, so the service refuses them."""


def resolve(name: str, options: Mapping[str, Value] | None = None) -> MethodSpec:
    """Check a method's name and options and fill in defaults. Raises MethodError naming the field."""
    base, plus, wrapper = name.partition("+")
    if base not in PRESETS or (plus and wrapper != "delta"):
        raise MethodError(
            "method", f"unknown attention method {name!r}; known: {', '.join(PRESETS)}, X+delta"
        )
    preset = PRESETS[base]
    known = {**preset.options, **(_DELTA if plus else {})}
    given = dict(options or {})
    for key, value in given.items():
        if key not in known:
            takes = ", ".join(known) or "none"
            raise MethodError(f"method_options.{key}", f"{name} has no option {key!r}; it takes: {takes}")
        given[key] = _checked(f"method_options.{key}", value, known[key])
    filled = {key: given.get(key, option.default) for key, option in known.items()}
    return MethodSpec(name, preset.selector, preset.executor, bool(plus), tuple(sorted(filled.items())))


def _checked(where: str, value: Value, option: Option) -> Value:
    number = float(value)
    if math.isnan(number) or not option.low <= number <= option.high:
        raise MethodError(where, f"{where} = {value} is outside {option.low} .. {option.high}")
    if isinstance(option.default, bool):
        return bool(value)
    if isinstance(option.default, int):
        if number != int(number):
            raise MethodError(where, f"{where} = {value} is not a whole number")
        value = int(number)
    if option.choices and value not in option.choices:
        raise MethodError(where, f"{where} = {value} is not one of {option.choices}")
    return value
