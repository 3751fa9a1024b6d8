"""Checks that this machine has the libraries and GPUs of a configuration."""

import ctypes
import importlib.util
from pathlib import Path

from ..config import ConfigError, ServiceConfig

_LIBRARIES = ("torch", "safetensors", "tokenizers")
_DRIVER, _TORCH_CUDA = "libcuda.so.1", "libtorch_cuda.so"
_CUDA_ERROR_NO_DEVICE = 100


def check_machine(settings: ServiceConfig) -> None:
    """Check libraries and GPUs. Raises ConfigError that names the missing library, or the key that needs a
    GPU."""
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"the library {library!r} is not installed: pip install {library}")
    for section in ("prefill", "decode"):
        if getattr(settings, section).device == "cuda" and (reason := _why_no_cuda()):
            raise ConfigError(f"{section}.device: cuda cannot be used: {reason}; cpu can")


def _why_no_cuda() -> str | None:
    """Say why no GPU can be used. It asks the driver, since torch takes seconds to load."""
    torch = importlib.util.find_spec("torch")
    if not (torch and torch.origin and (Path(torch.origin).parent / "lib" / _TORCH_CUDA).exists()):
        return "torch is a build without CUDA"
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, _CUDA_ERROR_NO_DEVICE):
        return f"NVIDIA's driver does not work (CUDA error {code})"
    return None if count.value else "CUDA finds no GPU (CUDA_VISIBLE_DEVICES may hide it)"
