"""Triton's interpreter without the work it does for nothing: most of its time in our kernels.

It reaches into triton 3.7 (pinned in constraints.txt); no result and no check of the interpreter changes.
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
    """Sums are not checked for overflow, whose outcome is looked at in debug mode only; the language is made
    the interpreter's own once for a launch, not again for every call of a device function; and what follows
    from a type alone is found out once for each type, not for every value."""
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
    """Their names. First asked for before anything in the package is patched."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function of this name, which searches the package every time."""
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _languages(function: Any) -> tuple[Any, ...]:
    """Those of Triton's modules that a kernel or device function sees."""
    return tuple(module for module in (tl, tl.core) if module in function.__globals__.values())


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def patch_lang(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in _languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()  # of nothing: a launch under way has done it

    return patch_lang


def _once_a_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of pointers all alike, and of a block its elements'."""
    find_once = functools.cache(find)

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        return find(scalar) if scalar.is_ptr() else find_once(scalar)

    return np_dtype


# A tuple's type, whose name spells out every member, is made when somebody asks for it: nobody does for the
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
    """One object for all equal block types, which nothing changes."""
    key = (element_ty.name, *(int(size) for size in shape))
    if key not in _BLOCKS:
        _BLOCKS[key] = object.__new__(cls)
    return _BLOCKS[key]


def _once_a_block(init: Callable[..., None]) -> Callable[..., None]:
    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "name"):
            init(self, element_ty, shape)

    return init_once
