"""Launches a Triton kernel again without asking Triton once more which of its forms is wanted.

Triton derives that at every launch from every argument, which takes the host longer than the launch itself:
a layer of sparse prefill launches thirteen kernels, and where a chunk is short the GPU waits for them. Here a
form that has been launched is found by what Triton specialises on, and no more is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import triton

_MAX_FORMS = 512
"""Keys of a kernel's forms. Numbers that Triton specialises on by being multiples of 16 are a part of them as
they are, so long prompts bring new ones; when there are so many, all are forgotten."""
_ALIGNED = 16
"""Bytes. Triton asks of a pointer whether it is a multiple."""


def cdiv(number: int, by: int) -> int:
    """As Triton's, which can be used in kernels, too, and takes the host longer than a launch's arguments."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The same. number: 1 or more."""
    return 1 << (number - 1).bit_length()


class Launcher:
    """`Launcher(kernel)[grid](*arguments, **constants)` does what `kernel[grid](…)` does.

    Parameters that are constants, and Triton's options (`num_warps`), come by name, all others by their
    place, which takes always the same kind of thing: tensors (or None), numbers, or descriptors whose
    `form` (hashable) says what Triton takes from them. Raises TypeError for a kernel whose constants are not
    its last parameters.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._parameters = getattr(function, "params", ())
        """Empty where Triton interprets: then nothing is compiled."""
        constants = [one.is_constexpr for one in self._parameters]
        if constants != sorted(constants):
            raise TypeError(f"{function}: constants must be the last parameters")
        self._compiled: dict[Hashable, Any] = {}
        self._pointers: Sequence[int] | None = None
        """Places of tensors; None before the first launch. What follows is known with it."""
        self._numbers: Sequence[int] = ()
        self._descriptors: Sequence[int] = ()
        self._unused: Sequence[None] = ()
        """In place of constants, of which a compiled kernel takes none."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        x, y, z = (*grid, 1, 1)[:3]
        return partial(self._launch, (x, y, z))

    def key(self, arguments: Sequence[Any], constants: dict[str, Any]) -> Hashable:
        """Equal for launches that are of one compiled form, and mostly different for others."""
        if (pointers := self._pointers) is None:
            pointers = self._look_at(arguments)
        return (
            triton.runtime.driver.active.get_current_device(),
            *constants.items(),
            *[arguments[place] for place in self._numbers],
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
            try:
                compiled[grid](*arguments, *self._unused)
                return
            except OverflowError:  # a number of more than 32 bits: another form
                pass
        if len(self._compiled) == _MAX_FORMS:
            self._compiled.clear()
        self._compiled[key] = self._function[grid](*arguments, **constants)

    def _look_at(self, arguments: Sequence[Any]) -> Sequence[int]:
        """Which places decide the form: numbers that Triton does not specialise on, and fractions, do not.
        Gives those of tensors. Raises TypeError for what is none of the things that are told apart."""
        for place, one in enumerate(arguments):
            if not (one is None or isinstance(one, torch.Tensor | int | float) or hasattr(one, "form")):
                raise TypeError(f"argument {place} is {type(one).__name__}, of which no form is known")
        free = {one.num for one in self._parameters if one.do_not_specialize}
        kinds = list(enumerate(arguments))
        self._descriptors = [place for place, one in kinds if hasattr(one, "form")]
        self._numbers = [place for place, one in kinds if isinstance(one, int) and place not in free]
        self._unused = [None] * sum(one.is_constexpr for one in self._parameters)
        self._pointers = [place for place, one in kinds if one is None or torch.is_tensor(one)]
        return self._pointers
