"""Options of attention methods: dataclass fields that carry their bounds and what they mean. Free of torch.

A method's options are one frozen dataclass whose fields are made with `option`:

    @dataclass(frozen=True)
    class StreamingOptions:
        window: int = option(2048, 1, 1 << 20, "most recent tokens that every query attends to")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Value = float | int | bool
V = TypeVar("V", bound=Value)
_KEY = "option"


@dataclass(frozen=True)
class Option:
    """One option: its default, its bounds (inclusive) or its choices, and what it means."""

    default: Value
    low: float
    high: float
    help: str
    choices: tuple[Value, ...] = ()


def option(default: V, low: float, high: float, help: str, choices: tuple[V, ...] = ()) -> V:
    """A field of an options dataclass. The bounds are what a request may ask for (`methods.method_spec`);
    whoever makes the dataclass itself, as benchmarks do, may go further."""
    return field(default=default, metadata={_KEY: Option(default, low, high, help, choices)})


def min_tokens() -> int:
    """The field `min_tokens`, of methods that save nothing on short prompts; see `build.DenseWhenShort`."""
    return option(4096, 0, 1 << 20, "prompts of at most this many tokens use dense attention")


def options_of(form: type[Any]) -> Mapping[str, Option]:
    """The options that an options dataclass declares, in its order. Raises TypeError for any other field."""
    for declared in fields(form):
        if _KEY not in declared.metadata:
            raise TypeError(f"{form.__name__}.{declared.name} is not made with `option`: it has no bounds")
    return {declared.name: declared.metadata[_KEY] for declared in fields(form)}
