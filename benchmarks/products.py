"""`python -m deltafront.benchmarks.products`: a stage's products and cuBLAS's, in turns.

Those of an 8B layer, gate and up with SiLU · up behind them, each alone and all one after the other. A card
at its power limit slows down, and what a kernel takes depends on what ran before it: so the two take turns of
a quarter of a second, of which the first third is not counted. Ours are checked against float64 first. Prints
a line for each case and writes benchmarks/results/products_h200.json (or --out); two minutes on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.layers.linear import linear, swiglu_linear
from ..kernels.layers.swiglu import swiglu
from ..tests.numerics import assert_rows_close
from .engine.model import SHAPES
from .engine.products import matrices
from .harness import commit_of, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "products_h200.json"
NAMES = ("qkv", "output", "gate_up", "down")
TURN_S = 0.25
CHECKED = 97
"""One row in so many is compared with float64."""

Product = Callable[[torch.Tensor, torch.Tensor], Any]


def gated(x_TI: torch.Tensor, weight_JI: torch.Tensor) -> Any:
    """cuBLAS's product and the kernel that follows it."""
    return swiglu(F.linear(x_TI, weight_JI), fp8=False)


class Layer:
    """Weights of a layer and inputs of `rows` rows, drawn anew."""

    def __init__(self, shapes: list[tuple[int, int]], rows: int) -> None:
        def draw(height: int, width: int) -> torch.Tensor:
            return torch.randn(height, width, device="cuda", dtype=torch.bfloat16)

        self.weights = [draw(out, width).mul_(width**-0.5) for out, width in shapes]
        self.inputs = [draw(rows, width) for _, width in shapes]

    def run(self, name: str, ours: bool) -> Callable[[], list[Any]]:
        """The product of that name, or all of them."""
        plain: Product = linear if ours else F.linear
        activated: Product = swiglu_linear if ours else gated
        steps = [
            (activated if one == "gate_up" else plain, x_TI, weight_OI)
            for one, x_TI, weight_OI in zip(NAMES, self.inputs, self.weights, strict=True)
            if name in (one, "layer")
        ]
        return lambda: [product(x_TI, weight_OI) for product, x_TI, weight_OI in steps]

    def flops(self, name: str) -> int:
        return sum(
            2 * x_TI.shape[0] * weight_OI.numel()
            for one, x_TI, weight_OI in zip(NAMES, self.inputs, self.weights, strict=True)
            if name in (one, "layer")
        )

    def check(self) -> None:
        for name, x_TI, weight_OI in zip(NAMES, self.inputs, self.weights, strict=True):
            (found,) = self.run(name, ours=True)()
            wanted = x_TI[::CHECKED].double() @ weight_OI.double().T
            if name == "gate_up":
                gate, up = wanted.chunk(2, dim=1)
                wanted = F.silu(gate) * up
            assert_rows_close(found[::CHECKED].double(), wanted, dtype=torch.bfloat16)


def turn_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one run among those of a turn."""
    event: Any = torch.cuda.Event  # untyped in torch
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    runs = max(6, int(TURN_S / (time.perf_counter() - began)))
    for number in range(runs):
        if number == runs // 3:
            begin.record()
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / (runs - runs // 3)


def compare(layer: Layer, name: str, rows: int, rounds: int) -> dict[str, Any]:
    """Medians, and that of the ratio of two turns that follow one another."""
    ours, theirs = layer.run(name, ours=True), layer.run(name, ours=False)
    turns = [(turn_ms(theirs), turn_ms(ours)) for _ in range(rounds)]
    ms = statistics.median(after for _, after in turns)
    return {
        "case": name,
        "rows": rows,
        "cublas_ms": round(statistics.median(before for before, _ in turns), 4),
        "ms": round(ms, 4),
        "tflops": round(layer.flops(name) / ms / 1e9, 1),
        "ratio": round(statistics.median(after / before for before, after in turns), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 8192, 16_384, 32_768])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found: list[dict[str, Any]] = []
    for rows in given.rows:
        layer = Layer(matrices(SHAPES["8b"]), rows)
        layer.check()
        for name in (*NAMES, "layer"):
            found.append(compare(layer, name, rows, given.rounds))
            print(found[-1], flush=True)
    record = {
        "gpu": torch.cuda.get_device_name(),
        "commit": given.commit or commit_of(ROOT),
        "torch": torch.__version__,
        "rows": found,
    }
    write_json(given.out, record)
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
