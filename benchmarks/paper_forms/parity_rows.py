"""Helpers of `parity`: compare rows of two selections, and load the papers' code.

Modules are loaded file by file. Packages that only other parts of the code need are replaced by empty
modules. Shape suffixes are defined in `kernels.interface`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from deltafront.kernels.build import options_for, part_of
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.methods import method_spec, registered
from deltafront.tests.numerics import spec_of, tiles

Rows = list[set[int]]


@dataclass(frozen=True)
class Compared:
    """The result of comparing our selection of tiles or pages with that of a paper's code.

    Attributes:
        same, rows: Number of rows with identical selections, and of all rows.
        shared: In rows that differ, the entries that both selections keep, divided by those that either
            keeps.
        ours, theirs: Number of entries that each selection keeps in all rows together.
    """

    name: str
    same: int
    rows: int
    shared: float
    ours: int
    theirs: int


def compared(name: str, ours: Rows, theirs: Rows) -> Compared:
    """Compare, row by row, which entries two selections keep.

    Raises:
        ValueError: They have different numbers of rows.
    """
    differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    either = sum(len(a | b) for a, b in differ)
    both = sum(len(a & b) for a, b in differ)
    entries = sum(map(len, ours)), sum(map(len, theirs))
    return Compared(name, len(ours) - len(differ), len(ours), both / either if either else 1.0, *entries)


def rows_of(kept_HNM: torch.Tensor) -> Rows:
    return [set(row.nonzero()[:, 0].tolist()) for row in kept_HNM.flatten(0, -2)]


def ours(x: AttentionInput, name: str, **options: float) -> Rows:
    """Return the tiles that our method keeps, by head and query block."""
    spec = method_spec(name, options)
    selector_path = registered(spec).selector
    assert selector_path is not None
    selector = part_of(selector_path)(options_for(spec))
    return [set(row) for row in tiles(selector.select(x, selector.new_state(spec_of(x)), no_phase))]


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Replace packages by empty modules, so that a file that imports them can be loaded without them."""
    with mock.patch.dict(sys.modules, {name: mock.MagicMock(name=name) for name in packages}):
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """Without a GPU, let code that moves tensors to "cuda" leave them on the CPU."""
    if torch.cuda.is_available():
        yield
        return
    move = torch.Tensor.to

    def stay(x: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        if where == ("cuda",):
            return x
        return move(x, *where, **how)

    with mock.patch.object(torch.Tensor, "to", stay):
        yield


def file_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"parity_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repeated(x: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q, and k repeated for each query head, because the papers' code does not support GQA."""
    return x.q_BHTD, x.k_BGSD.repeat_interleave(x.group, dim=1)
