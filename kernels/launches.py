"""Launches compiled Triton kernels without Triton's cache look-up, which costs more host time than the
launch."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import triton

_MAX_FORMS = 512
"""Maximum number of compiled kernels in a launcher. Long prompts add some; a full launcher drops all."""
_ALIGNED = 16
"""Triton specialises on pointers that are a multiple of this many bytes."""

_LOWEST, _HIGHEST = -(1 << 31), (1 << 31) - 1
"""The range of a 32-bit argument. A number outside it needs a kernel compiled for 64 bits: a kernel for 32
bits would get it truncated, without an error (Triton 3.7)."""


def cdiv(number: int, by: int) -> int:
    """Divide and round up. Triton's version takes more host time."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Round `number` (1 or more) up to a power of two. Triton's version takes more host time."""
    return 1 << (number - 1).bit_length()


def strides(*tensors: torch.Tensor, dims: int = 3) -> list[int]:
    """Return each tensor's first `dims` strides, in the order in which kernels take them."""
    return [stride for x in tensors for stride in x.stride()[:dims]]


class Launcher:
    """Launches one kernel: `Launcher(kernel)[grid](*arguments, **constants)` does what `kernel[grid](…)`
    does.

    Constants and Triton's options are passed by name, other arguments by position. A position always takes
    the same kind of argument: a tensor (or None), a number, or a descriptor with a hashable `form`.

    Raises:
        TypeError: The kernel's constants are not its last parameters.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._parameters = getattr(function, "params", ())
        """Empty in Triton's interpreter."""
        constants = [parameter.is_constexpr for parameter in self._parameters]
        if constants != sorted(constants):
            raise TypeError(f"{function}: constants must be the last parameters")
        self._compiled: dict[Hashable, Any] = {}
        self._pointers: Sequence[int] | None = None
        """Positions of tensors; None before the first launch."""
        self._numbers: Sequence[int] = ()
        self._free_numbers: Sequence[int] = ()
        """Positions of numbers that Triton does not specialise on."""
        self._descriptors: Sequence[int] = ()
        self._unused: Sequence[None] = ()
        """A None for each constant, since constants are compiled in."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        x, y, z = (*grid, 1, 1)[:3]
        return partial(self._launch, (x, y, z))

    def key(self, arguments: Sequence[Any], constants: dict[str, Any]) -> Hashable:
        """Return the cache key: launches with equal keys share a compiled kernel."""
        if (pointers := self._pointers) is None:
            pointers = self._look_at(arguments)
        return (
            triton.runtime.driver.active.get_current_device(),
            *constants.items(),
            *[arguments[place] for place in self._numbers],
            *[place for place in self._free_numbers if not _LOWEST <= arguments[place] <= _HIGHEST],
            *[arguments[place].form for place in self._descriptors],
            *[
                None if (x := arguments[place]) is None else (x.dtype, x.data_ptr() % _ALIGNED)
                for place in pointers
            ],
        )

    def _launch(self, grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
        if not self._parameters:
            self._function[grid](*arguments, **constants)
            return
        key = self.key(arguments, constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *self._unused)
            return
        if len(self._compiled) == _MAX_FORMS:
            self._compiled.clear()
        self._compiled[key] = self._function[grid](*arguments, **constants)

    def _look_at(self, arguments: Sequence[Any]) -> Sequence[int]:
        """Record which positions hold descriptors, numbers and tensors. Return the tensors' positions."""
        for place, argument in enumerate(arguments):
            if not (
                argument is None
                or isinstance(argument, torch.Tensor | int | float)
                or hasattr(argument, "form")
            ):
                raise TypeError(f"argument {place} is {type(argument).__name__}, of which no form is known")
        free = {parameter.num for parameter in self._parameters if parameter.do_not_specialize}
        kinds = list(enumerate(arguments))
        self._descriptors = [place for place, argument in kinds if hasattr(argument, "form")]
        numbers = [place for place, argument in kinds if isinstance(argument, int)]
        self._numbers = [place for place in numbers if place not in free]
        self._free_numbers = [place for place in numbers if place in free]
        self._unused = [None] * sum(parameter.is_constexpr for parameter in self._parameters)
        self._pointers = [place for place, argument in kinds if argument is None or torch.is_tensor(argument)]
        return self._pointers
