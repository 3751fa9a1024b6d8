"""Describes this machine's hardware, and checks that it has the libraries, GPUs and open files of a
configuration.
"""

import contextlib
import ctypes
import importlib.util
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from deltafront.service.config import ConfigError, ServiceConfig

_LIBRARIES = ("torch", "safetensors", "tokenizers")
_DRIVER, _TORCH_CUDA = "libcuda.so.1", "libtorch_cuda.so"
_CUDA_ERROR_NO_DEVICE = 100
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN"
"""The most client connections of HAProxy."""
_DEFAULT_CONNECTIONS = 4096
_OWN_FILES = 128
"""Open files of HAProxy for listeners, threads and logs."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA shows to this process. gib: total memory."""

    name: str
    gib: float


@dataclass(frozen=True)
class Machine:
    """The GPUs and the host memory of this machine.

    Attributes:
        gpus: In CUDA's order.
        no_gpu: The reason why there are none; None if there are some.
        free_gib: Host memory that is free or reclaimable, within the cgroup's limit.
    """

    gpus: tuple[Gpu, ...]
    no_gpu: str | None
    free_gib: float


def this_machine() -> Machine:
    reason = why_no_cuda()
    return Machine(() if reason else _gpus(), reason, _free_bytes() / (1 << 30))


def check_machine(settings: ServiceConfig) -> None:
    """Check libraries, open files and GPUs. Raises ConfigError that names the missing library, the limit, or
    the key that needs a GPU."""
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"the library {library!r} is not installed: pip install {library}")
    _check_open_files()
    for section in ("prefill", "decode"):
        if getattr(settings, section).device == "cuda" and (reason := why_no_cuda()):
            raise ConfigError(f"{section}.device: cuda cannot be used: {reason}; cpu can")
    _check_host_cache(settings)


def _check_host_cache(settings: ServiceConfig) -> None:
    decode, free = settings.decode, _free_bytes() / (1 << 30)
    wanted = decode.host_cache_gib * max(decode.workers, decode.max_workers or 1)
    if wanted > free:
        raise ConfigError(
            f"decode.host_cache_gib: {decode.host_cache_gib:g} for each decode worker is {wanted:g} GiB, "
            f"but {free:.1f} GiB of this machine's memory are free: lower it, or 0"
        )


def _check_open_files() -> None:
    """Check the hard limit of open files, to which HAProxy raises its own limit. If the limit were too low,
    HAProxy would be restarted forever.

    HAProxy counts two files for each client, and a pipe for every fourth client. Raises ConfigError.
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


def why_no_cuda() -> str | None:
    """Return the reason why no GPU can be used; None if some can. The function asks the driver, because torch
    takes seconds to load."""
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


def _gpus() -> tuple[Gpu, ...]:
    """List the GPUs. `why_no_cuda` must have initialised the driver."""
    driver, count = ctypes.CDLL(_DRIVER), ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    driver.cuDeviceGetName(name, len(name), index)  # a device's handle is its index
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), index)
    return Gpu(name.value.decode(), size.value / (1 << 30))


def _free_bytes() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        used = int(_CGROUP_LIMIT.with_name("memory.current").read_text(encoding="ascii"))
        free = min(free, int(_CGROUP_LIMIT.read_text(encoding="ascii")) - used)
    return free
