"""A fake GPU that computes nothing: tensors have no memory, and kernels are recorded instead of compiled.

Code for a GPU then runs on any machine up to each kernel launch, and a test can check which kernels would be
compiled. Numbers that the host reads are zeros, and conditions are true. Triton must not be in its
interpreter mode.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from deltafront.kernels.launches import Launcher

DEVICE = torch.device("cuda", 7)
"""No real device has this index, so that caches by device are not shared with other tests."""
_META = torch.device("meta")
_MULTIPROCESSORS = 132

_device_of = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_is_cuda = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class FakeGpu:
    """Records what happens on the fake GPU.

    Attributes:
        reads: The places (function, file, line) where the host waited for a value from the GPU.
        confused: Kernels that a `Launcher` would have launched in another specialisation than Triton.
    """

    reads: ClassVar[list[str]] = []
    confused: ClassVar[set[str]] = set()

    @classmethod
    def note(cls, what: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and "deltafront" not in frame.f_code.co_filename:
            frame = frame.f_back
        where = frame.f_code.co_filename.rpartition("deltafront/")[2]
        cls.reads.append(f"{what} at {where}:{frame.f_lineno}")


class _Tensors(TorchFunctionMode):
    """Makes the GPU's tensors on torch's `meta` device. They report that they are on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = tuple(_META if _names_gpu(one) else one for one in args)
        kwargs = {name: _META if _names_gpu(one) else one for name, one in (kwargs or {}).items()}
        is_pinned = kwargs.pop("pin_memory", False)
        if func == torch.Tensor.pin_memory:
            return args[0]
        if func == torch.Tensor.copy_ and _on_gpu(args[1]) and not _on_gpu(args[0]):
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                FakeGpu.note("copy_")
            return args[0].copy_(_read(args[1]))
        if func == torch.Tensor.to and _on_gpu(args[0]) and "cpu" in map(str, args[1:]):
            if not kwargs.get("non_blocking"):
                FakeGpu.note("to")
            return _read(args[0])
        if args and func in _TOLD and _on_gpu(args[0]):
            if func in _READS:
                FakeGpu.note(func.__name__)
            return _TOLD[func](args[0])
        made = func(*args, **kwargs)
        return made.zero_() if is_pinned else made  # no kernel writes to it


def _read(x: torch.Tensor) -> torch.Tensor:
    """Return zeros in place of the values that the host reads."""
    return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)


_TOLD = {
    _device_of: lambda x: DEVICE,
    _is_cuda: lambda x: True,
    torch.Tensor.__bool__: lambda x: True,
    torch.Tensor.data_ptr: lambda x: x.storage_offset() * x.element_size(),
    torch.Tensor.tolist: lambda x: _read(x).tolist(),
}
"""Attributes and methods of a tensor on the fake GPU."""
_READS = (torch.Tensor.__bool__, torch.Tensor.tolist)


def _on_gpu(one: Any) -> bool:
    """Called where the mode is off."""
    return isinstance(one, torch.Tensor) and bool(_device_of(one) == _META)


def _names_gpu(one: Any) -> bool:
    return isinstance(one, torch.device | str) and str(one).startswith("cuda")


_DRIVER = SimpleNamespace(
    get_current_device=lambda: DEVICE.index,
    get_current_stream=lambda _device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_active_torch_device=lambda: DEVICE,
)
_CUDA = {
    "Event": mock.MagicMock(**{"return_value.elapsed_time.return_value": 0.0}),
    "get_device_capability": lambda _device=None: (9, 0),
    "get_device_properties": lambda _device=None: SimpleNamespace(multi_processor_count=_MULTIPROCESSORS),
    **{
        name: mock.MagicMock()
        for name in ("Stream", "current_stream", "stream", "synchronize", "empty_cache")
    },
    **{name: mock.MagicMock() for name in ("CUDAGraph", "graph", "graph_pool_handle")},
}


@contextlib.contextmanager
def fake_gpu() -> Iterator[set[tuple[str, str]]]:
    """Yield a set that collects what would be compiled: each kernel's name and the key of its
    specialisation."""
    seen: set[tuple[str, str]] = set()
    forms: dict[Any, str] = {}
    asked: Any = None
    FakeGpu.confused.clear()

    def note(function: Any, key: str, *_rest: Any) -> None:
        seen.add((function.__name__, key))
        if asked is not None and forms.setdefault(asked, key) != key:
            FakeGpu.confused.add(function.__name__)

    def launch(self: Launcher, grid: Any, *arguments: Any, **constants: Any) -> None:
        nonlocal asked
        asked = id(self), self.key(arguments, constants)
        self._function[grid](*arguments, **constants)
        asked = None

    def at_once(_pool: Any, run: Any, *args: Any) -> Future[Any]:
        """Run work on this thread, because other threads would not be in this mode."""
        future: Future[Any] = Future()
        future.set_result(run(*args))
        return future

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_DRIVER)  # type: ignore[arg-type]
    try:
        with (
            mock.patch.object(JITFunction, "_do_compile", note),
            mock.patch.object(Launcher, "_launch", launch),
            mock.patch.object(ThreadPoolExecutor, "submit", at_once),
            mock.patch.multiple(torch.cuda, **_CUDA),
            _Tensors(),
        ):
            yield seen
    finally:
        triton.runtime.driver._active = before
