"""Libraries and CUDA that a configuration needs on this machine, looked for before Ray starts."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from ..config import ConfigError, ServiceConfig

_LIBRARIES = ("torch", "safetensors", "tokenizers", "transformers")
"""Libraries that every service loads."""
_DRIVER, _CUDA_PART = "libcuda.so.1", "libtorch_cuda.so"
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""


def check_machine(settings: ServiceConfig) -> None:
    """Raises ConfigError that names the library, or the key."""
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"the library {library!r} is not installed: pip install {library}")
    for part in ("prefill", "decode"):
        if getattr(settings, part).device == "cuda" and (trouble := _without_cuda()):
            raise ConfigError(f"{part}.device: cuda cannot be used: {trouble}; cpu can")


def _without_cuda() -> str:
    """Why nothing can run on a GPU here; empty if it can. Without torch, which takes seconds to load."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib" / _CUDA_PART).exists():
        return "torch is a build without CUDA"
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, _NO_DEVICE):
        return f"NVIDIA's driver does not work (CUDA error {code})"
    return "" if count.value else "CUDA finds no GPU (CUDA_VISIBLE_DEVICES may hide it)"
