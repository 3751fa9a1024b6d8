"""`python -m deltafront.benchmarks.power`: what the card's power does to the attention kernels.

Times each kernel from rest (one launch after 0.6 s of idling, three times), then launches it for 1.6 s
while nvidia-smi is asked ten times a second for watts, SM clock, temperature and what limits the clock (4:
the power cap). Products of matrices of random numbers and of zeros stand beside them. Writes no file.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import cases_executors as cases
from .harness import BenchConfig

ASKED = "power.draw.instant,clocks.sm,temperature.gpu,clocks_event_reasons.active"
SECONDS = 1.6
SHAPES = ((64, 9, 3, 131_072), (128, 32, 8, 65_536))
"""Head dimension, query heads, key heads, tokens."""


def watch(name: str, run: Callable[[], object], flops: float) -> None:
    """Print a case's rates in TFLOP/s and the card's state while it runs."""
    run()
    torch.cuda.synchronize()
    rested = []
    for _ in range(3):
        time.sleep(0.6)
        rested.append(_milliseconds(run))
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "-lms", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        time.sleep(0.25)
        began = time.perf_counter()
        times: list[tuple[float, float]] = []
        while (now := time.perf_counter() - began) < SECONDS:
            times.append((now, _milliseconds(run)))
        asking.terminate()
        states = asking.stdout.read().split("\n") if asking.stdout else []
    last = statistics.median(ms for at, ms in times if at > SECONDS - 0.5)

    def rate(ms: float) -> float:
        return round(flops / ms / 1e9, 1)

    print(f"{name}: rested {[rate(ms) for ms in rested]}, last half second {rate(last)} TFLOP/s")
    print("    " + " | ".join(state for state in states[2:] if state), flush=True)


def _milliseconds(run: Callable[[], object]) -> float:
    """One run, waited for, its launch included."""
    event: Any = torch.cuda.Event  # untyped in torch
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _squares(a: torch.Tensor, count: int) -> None:
    for _ in range(count):
        torch.matmul(a, a)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    side, products = 8192, 8
    for name, make in (("random", torch.randn), ("zeros", torch.zeros)):
        a = make(side, side, dtype=torch.bfloat16, device="cuda")
        watch(f"matrix product, {name}", partial(_squares, a, products), products * 2 * side**3)
    for dim, heads, key_heads, tokens in SHAPES:
        x = BenchConfig(torch.device("cuda")).structured(tokens, heads, key_heads, dim)
        for name, prepare in (
            ("dense", cases._dense),
            ("lists", cases._sparse),
            ("Delta-KV", cases._delta_kv),
        ):
            timed = prepare(x)
            assert timed.flops is not None
            watch(f"D {dim}, {name}", timed.run, timed.flops)


if __name__ == "__main__":
    main()
