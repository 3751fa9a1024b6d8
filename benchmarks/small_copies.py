"""How long a small copy takes beside large ones of the same GPU, by its kind: what waits for a copy engine.

    python -m deltafront.benchmarks.small_copies [--queued-mib 512] [--piece-mib 8]

A thread copies between pinned memory and the GPU without a pause, in pieces, --queued-mib asked for at once.
Another stream copies little and waits for it. Prints medians and the longest, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import torch

from deltafront.benchmarks.harness import repeated
from deltafront.kernels.layers.to_host import choices_to_host

_TIMES, _PAUSE_S = 60, 0.0037
_SMALL, _OVER = 16_384, 17_000
"""int32 numbers: 64 KiB, up to which the driver sends pageable memory along with its commands; and more."""


def kinds() -> Mapping[str, Callable[[], object]]:
    """Return the small copies by name."""
    ids, logprob = torch.arange(64, device="cuda"), torch.rand(64, device="cuda")
    chosen = torch.stack((ids.double(), logprob.double()), dim=1)
    pinned, pageable = torch.zeros(64, 2, dtype=torch.float64).pin_memory(), chosen.cpu()
    table = torch.arange(_OVER, dtype=torch.int32)
    pinned_table, on_gpu = table.pin_memory(), table.cuda()
    return {
        "to the host, pinned": lambda: pinned.copy_(chosen, non_blocking=True),
        "to the host, pageable": lambda: pageable.copy_(chosen),
        "to the host, a kernel": lambda: choices_to_host(ids, logprob, pinned),
        "to the GPU, pageable, 64 KiB": lambda: on_gpu[:_SMALL].copy_(table[:_SMALL]),
        "to the GPU, pageable, 68 KB": lambda: on_gpu.copy_(table),
        "to the GPU, pinned, 64 KiB": lambda: on_gpu[:_SMALL].copy_(pinned_table[:_SMALL], non_blocking=True),
        "to the GPU, pinned, 68 KB": lambda: on_gpu.copy_(pinned_table, non_blocking=True),
    }


def times_ms(copy: Callable[[], object]) -> list[float]:
    times = list[float]()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(_TIMES):
            time.sleep(_PAUSE_S)
            began = time.perf_counter()
            copy()
            stream.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queued-mib", type=int, default=512)
    parser.add_argument("--piece-mib", type=int, default=8)
    given = parser.parse_args()
    size, piece = given.queued_mib << 20, given.piece_mib << 20
    host, gpu = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8).cuda()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy_all(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            for at in range(0, size, piece):
                target[at : at + piece].copy_(source[at : at + piece], non_blocking=True)
            stream.synchronize()

    copies = kinds()
    for copy in copies.values():
        copy()
    for beside, large in (
        ("nothing", nullcontext()),
        ("copies to the GPU", repeated(partial(copy_all, gpu, host))),
        ("copies to the host", repeated(partial(copy_all, host, gpu))),
    ):
        with large:
            for name, copy in copies.items():
                times = times_ms(copy)
                print(
                    f"beside {beside:19} {name:30} {statistics.median(times):7.2f} {max(times):7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
