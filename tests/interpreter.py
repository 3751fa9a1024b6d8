"""Triton's interpreter without the work it does for nothing: more than half of its time in our kernels.

It reaches into triton 3.6 (pinned in constraints.txt); no result and no check of the interpreter changes.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def without_idle_work() -> None:
    """Two things. At every call of a device function the interpreter searches all of triton.language for
    builtins, whose names never change. And it computes for every sum whether it overflows, but looks at
    the outcome only in debug mode."""
    interpreter._patch_builtin = _patch_builtin
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "an overflow would be noticed"
    builder.options = replace(builder.options, sanitize_overflow=False)


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """Their names. First asked for before anything in the package is patched."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function of this name."""
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)
