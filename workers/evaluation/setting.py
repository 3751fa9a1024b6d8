"""Settings of prefill that are compared: a method, its options and recomputed blocks."""

from __future__ import annotations

from dataclasses import dataclass

from deltafront.kernels.methods import MethodSpec, method_spec


@dataclass(frozen=True)
class Setting:
    """An attention method with options, and the number of blocks to recompute densely for the question. With
    0 blocks, the prompt's end is not prefilled again either.
    """

    method: str
    blocks: int = 0

    @classmethod
    def parse(cls, given: str) -> Setting:
        """Parse `METHOD[:OPTIONS][@BLOCKS]`. Raises ValueError."""
        method, _, blocks = given.partition("@")
        if blocks and not blocks.isdecimal():
            raise ValueError(f"no setting {given!r}: METHOD, METHOD:OPTION=NUMBER,… or METHOD:…@BLOCKS")
        parse_method(method)
        return cls(method, int(blocks or 0))

    def __str__(self) -> str:
        return f"{self.method}@{self.blocks}" if self.blocks else self.method


def split_method(method: str) -> tuple[str, dict[str, float]]:
    """Split `dpxa:tau=0.9,k_anchors=16` into name and options. Raises ValueError."""
    name, _, given = method.partition(":")
    options: dict[str, float] = {}
    for pair in filter(None, given.split(",")):
        key, _, value = pair.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            raise ValueError(f"no method {method!r}: NAME, or NAME:OPTION=NUMBER,OPTION=NUMBER") from None
    return name, options


def parse_method(method: str) -> MethodSpec:
    """Parse `NAME:OPTION=NUMBER,…` and fill in defaults of options not given. Raises ValueError."""
    return method_spec(*split_method(method))


def known_method(method: str) -> str:
    """Check a method and return it as it was given. Raises ValueError."""
    parse_method(method)
    return method
