"""Arguments of the command lines here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as argparse's `type`, which of a ValueError would not say what is wrong."""

    def parsed(given: str) -> T:
        try:
            return parse(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
