"""Checks that this machine has the libraries, GPUs and open files that a configuration needs."""

import ctypes
import importlib.util
import os
import resource
from pathlib import Path

from ..config import ConfigError, ServiceConfig

_LIBRARIES = ("torch", "safetensors", "tokenizers")
_DRIVER, _TORCH_CUDA = "libcuda.so.1", "libtorch_cuda.so"
_CUDA_ERROR_NO_DEVICE = 100

_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN"
"""Clients that HAProxy holds at once."""
_DEFAULT_CONNECTIONS = 4096
_OWN_FILES = 128
"""Listeners, threads and logs of HAProxy."""


def check_machine(settings: ServiceConfig) -> None:
    """Check libraries, open files and GPUs. Raises ConfigError that names the missing library, the limit, or
    the key that needs a GPU."""
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"the library {library!r} is not installed: pip install {library}")
    _check_open_files()
    for section in ("prefill", "decode"):
        if getattr(settings, section).device == "cuda" and (reason := _why_no_cuda()):
            raise ConfigError(f"{section}.device: cuda cannot be used: {reason}; cpu can")


def _check_open_files() -> None:
    """Check the hard limit, to which HAProxy raises its own; with less it would be restarted for ever.

    HAProxy counts two files for each client, and a pipe for every fourth. Raises ConfigError.
    """
    connections = int(os.environ.get(_CONNECTIONS, _DEFAULT_CONNECTIONS))
    needed, limit = _files_for(connections), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < needed:
        fewer = max(1, (limit - _OWN_FILES) * 2 // 5)
        raise ConfigError(
            f"ulimit -Hn is {limit}, but HAProxy needs {needed} open files for {connections} clients: raise "
            f"the hard limit (LimitNOFILE= of systemd, --ulimit nofile= of docker), or set {_CONNECTIONS}="
            f"{fewer} in the environment"
        )


def _files_for(connections: int) -> int:
    return connections * 5 // 2 + _OWN_FILES


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
