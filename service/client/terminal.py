"""What the command line takes from the terminal, and how it fails: in one plain line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from ..errors import DeltafrontError
from .client import DeltafrontClient
from .display import advice

err = Console(stderr=True)
"""Everything but answers goes to standard error."""


@contextmanager
def calling(address: str, token: str, tls: bool) -> Iterator[DeltafrontClient]:
    """A client whose errors end the command."""
    try:
        with DeltafrontClient(address, token or None, tls=tls) as client:
            yield client
    except DeltafrontError as error:
        hint = advice(error, address)
        fail(f"{error.message or error.code.name}" + (f" ({hint})" if hint else ""))
    except KeyboardInterrupt:
        fail("interrupted; the request was cancelled")


def read_text(file: str) -> str:
    """A file's text, or standard input for `-`."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")


def read_options(pairs: list[str]) -> dict[str, float]:
    """NAME=NUMBER pairs."""
    options = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            options[name] = float(value)
        except ValueError:
            fail(f"--option {pair}: must be NAME=NUMBER")
    return options


def fail(message: str) -> NoReturn:
    """End the command with one line."""
    err.print(f"deltafront: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)
