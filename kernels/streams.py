"""Launches beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


@contextmanager
def two_at_once(device: torch.device) -> Iterator[AbstractContextManager[Any]]:
    """Gives a context whose launches run beside those of the block outside of it, behind what was launched
    before the block; what is launched after the block comes behind both.

    Tensors that are made in the context must not outlive the block. In the interpreter one follows the other.
    """
    if device.type != "cuda":
        yield nullcontext()
        return
    stream, other = torch.cuda.current_stream(device), _other(device)
    other.wait_stream(stream)
    try:
        yield torch.cuda.stream(other)
    finally:
        stream.wait_stream(other)


@cache
def _other(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
