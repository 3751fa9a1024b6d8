"""Makes Triton's interpreter faster by leaving out unneeded work, which is most of its time in our kernels.

It patches triton 3.7 (pinned in constraints.txt). The interpreter's results and checks do not change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def without_idle_work() -> None:
    """Skip overflow checks, whose results only debug mode uses. Patch the language once per launch, not at
    every call of a device function. Compute properties of a type once, not for every value."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "an overflow would be noticed"
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)
    tl.tuple.__init__, tl.tuple.type = _keep_values, _TYPE
    tl.block_type.__new__, tl.block_type.__init__ = _shared, _once_a_block(tl.block_type.__init__)


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """Return the names of the builtins. The first call must precede all patches of the package."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Do the same as the interpreter's function of this name, which searches the package at each call."""
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _languages(function: Any) -> tuple[Any, ...]:
    """Return the Triton modules that a kernel or device function uses."""
    return tuple(module for module in (tl, tl.core) if module in function.__globals__.values())


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def patch_lang(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in _languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()  # empty, because the current launch has patched it

    return patch_lang


def _once_a_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a property by type. All pointers are alike, and a block is like its elements."""
    find_once = functools.cache(find)

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        return find(scalar) if scalar.is_ptr() else find_once(scalar)

    return np_dtype


# A tuple's type, whose name lists every member, is made on demand: it is not needed for the
# shapes that every tensor has.
_TYPE = functools.cached_property(lambda values: tl.core._type_for_tuple_values(values.values))
_TYPE.__set_name__(tl.tuple, "type")
_make_tuple = tl.tuple.__init__


def _keep_values(self: Any, args: Any, type: Any = None) -> None:
    if type is None:
        self.values = list(args)
    else:
        _make_tuple(self, args, type)


_BLOCKS: dict[tuple[str, ...], Any] = {}


def _shared(cls: Any, element_ty: Any, shape: Any) -> Any:
    """Share one object among equal block types, which are immutable."""
    key = (element_ty.name, *(int(size) for size in shape))
    if key not in _BLOCKS:
        _BLOCKS[key] = object.__new__(cls)
    return _BLOCKS[key]


def _once_a_block(init: Callable[..., None]) -> Callable[..., None]:
    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "name"):
            init(self, element_ty, shape)

    return init_once
