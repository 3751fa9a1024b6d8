"""Tests `Launcher`: which launches share a compiled kernel, and which arguments the kernel gets.

tests/workers/test_specialisations.py checks, for every kernel of a prompt, that Triton would use the same
compiled kernel for launches with equal keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import cdiv as tritons_cdiv
from triton import next_power_of_2 as tritons_power

from deltafront.kernels import launches
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2


class Compiled:
    """Imitates a compiled kernel that takes integers of `bits` bits and silently truncates wider ones."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            self.launched.append((grid, tuple(map(self.cut, arguments))))

        return run

    def cut(self, argument: Any) -> Any:
        half = 1 << (self.bits - 1)
        return (argument + half) % (2 * half) - half if isinstance(argument, int) else argument


class Function:
    """Imitates a Triton function of a tensor, a number that Triton specialises on, one that it does not
    specialise on, and a constant."""

    params = tuple(
        SimpleNamespace(num=number, do_not_specialize=number == 2, is_constexpr=number == 3)
        for number in range(4)
    )

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Compiled:
            self.asked.append((grid, arguments, constants))
            self.made.append(Compiled(32 if -(1 << 31) <= arguments[2] < 1 << 31 else 64))
            return self.made[-1]

        return run


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    return Launcher(Function())


X = torch.zeros(64)


def test_repeated_launches_skip_tritons_lookup(launcher: Launcher) -> None:
    for row in (7, 8, 9):
        launcher[(5,)](X, 32, row, WIDE=True, num_warps=4)
    function = launcher._function
    assert function.asked == [((5, 1, 1), (X, 32, 7), {"WIDE": True, "num_warps": 4})]
    assert function.made[0].launched == [((5, 1, 1), (X, 32, row, None)) for row in (8, 9)]


OTHERS: dict[str, Any] = {
    "type": ((X.half(), 32, 7), True),
    "alignment": ((X[1:], 32, 7), True),
    "no tensor": ((None, 32, 7), True),
    "number": ((X, 33, 7), True),
    "constant": ((X, 32, 7), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_looks_up_a_kernel_once_for_each_new_kind_of_arguments(launcher: Launcher, name: str) -> None:
    arguments, wide = OTHERS[name]
    for _ in range(2):
        launcher[(5,)](X, 32, 7, WIDE=True)
        launcher[(5,)](*arguments, WIDE=wide)
    assert len(launcher._function.asked) == 2
    assert [len(one.launched) for one in launcher._function.made] == [1, 1]


def test_launcher_never_passes_64_bit_integers_to_a_32_bit_kernel(launcher: Launcher) -> None:
    rows = (7, 1 << 31, 1 << 32, (1 << 31) - 1, -(1 << 31), -(1 << 31) - 1)
    for row in rows:
        launcher[(5,)](X, 32, row, WIDE=True)
    function = launcher._function
    assert [arguments[2] for _, arguments, _ in function.asked] == [7, 1 << 31]
    seen = [arguments[2] for made in function.made for _, arguments in made.launched]
    assert sorted(seen) == sorted(rows[2:]), "no number is cut"


def test_caches_one_kernel_for_each_kind_of_tma_descriptor(launcher: Launcher) -> None:
    for block in (64, 128, 64, 128):
        launcher[(5,)](SimpleNamespace(form=(torch.float16, block)), 32, 7, WIDE=True)
    assert len(launcher._function.asked) == 2


def test_launcher_refuses_arguments_of_unknown_type(launcher: Launcher) -> None:
    """A descriptor needs a `form`. Otherwise two different descriptors would share one compiled kernel."""
    with pytest.raises(TypeError, match="argument 0 is SimpleNamespace, of which no form is known"):
        launcher[(5,)](SimpleNamespace(shape=(2, 2)), 32, 7, WIDE=True)
    assert launcher._function.asked == []


def test_launcher_refuses_a_kernel_whose_constants_are_not_last() -> None:
    """The launcher passes constants after all other arguments."""
    function = Function()
    function.params = tuple(reversed(Function.params))  # type: ignore[misc]
    with pytest.raises(TypeError, match="constants must be the last parameters"):
        Launcher(function)


def test_launcher_caches_nothing_in_tritons_interpreter() -> None:
    function = Function()
    function.params = ()  # type: ignore[misc]
    interpreted = Launcher(function)
    for _ in range(3):
        interpreted[(2, 3)](X, 32, 7, WIDE=True)
    assert [grid for grid, *_ in function.asked] == [(2, 3, 1)] * 3


def test_launcher_bounds_the_number_of_cached_kernels(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_MAX_FORMS", 4)
    for number in range(100):
        launcher[(1,)](X, number, 7, WIDE=True)
        assert len(launcher._compiled) <= 4


def test_cdiv_and_next_power_of_2_equal_tritons() -> None:
    for number in range(1, 300):
        assert next_power_of_2(number) == tritons_power(number)
        assert all(cdiv(number, by) == tritons_cdiv(number, by) for by in range(1, 20))
