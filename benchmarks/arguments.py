"""Command-line arguments of the benchmarks."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of the module that runs. Its help shows `description` without rewrapping it."""
    spec = sys.modules["__main__"].__spec__
    return argparse.ArgumentParser(
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `parse` for argparse's `type`, so that the user sees the text of its ValueError."""

    def parsed(given: str) -> T:
        try:
            return parse(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def parse_shard(given: str) -> tuple[int, int]:
    """Parse "I/N", process I of N, counted from 0. Raises ValueError."""
    match = re.fullmatch(r"(\d+)/(\d+)", given)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"no shard {given!r}: I/N with I from 0 to N - 1")
    return int(match[1]), int(match[2])
