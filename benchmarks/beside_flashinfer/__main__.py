"""Compares our kernels with FlashInfer's and prints a table of times.

    python -m deltafront.benchmarks.beside_flashinfer

Shapes are those of Llama-3.1-8B. The outputs of each pair are compared, then both are timed: microseconds per
call, medians over replays of a CUDA graph. The calls of a graph rotate through copies of the inputs, so that
no input is in L2. FlashInfer compiles its kernels with nvcc at their first use.

The script writes benchmarks/results/beside_flashinfer.json: {"gpu", "commit", "torch", "triton",
"flashinfer", "rows"}. `ratio` is FlashInfer's time over ours: above 1, ours is faster. If a pair fails, the
script names it and exits with 1.
"""

from __future__ import annotations

import importlib.util
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.beside_flashinfer import attention, layers, sampling
from deltafront.benchmarks.beside_flashinfer.pairs import CONFIG, Pair, measure
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.markdown import Result, markdown, provenance

ROOT = Path(__file__).resolve().parents[2]
GROUPS: dict[str, Callable[[Any], Iterator[Pair]]] = {
    "norm": layers.norms,
    "activation": layers.activations,
    "rope": layers.rotations,
    "decode": attention.decode,
    "sampling": sampling.sampling,
}


def table(result: Result) -> str:
    header = ("operation", "shape", "ours µs", "FlashInfer µs", "ratio", "largest difference")
    rows = [
        [
            row["op"],
            row["shape"],
            f"{row['ours_us']:.1f}",
            f"{row['flashinfer_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['difference']:.2g}",
        ]
        for row in result["rows"]
    ]
    return markdown(header, rows) + provenance(result)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=GROUPS)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "beside_flashinfer.json"
    )
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if importlib.util.find_spec("flashinfer") is None:
        parser.error("needs FlashInfer: pip install flashinfer-python; it compiles its kernels with nvcc")
    if failed := _measure_all(args.only, args.out, args.commit or commit_of(ROOT)):
        parser.exit(1, f"failed: {', '.join(failed)}\n")


def _measure_all(groups: Sequence[str], out: Path, commit: str) -> list[str]:
    """Measure groups of pairs. Return the names of pairs that failed."""
    import flashinfer
    import triton

    torch.manual_seed(CONFIG.seed)
    record: Result = {
        "gpu": torch.cuda.get_device_name(),
        "commit": commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flashinfer": flashinfer.__version__,
        "rows": [],
    }
    failed = []
    for pair in itertools.chain.from_iterable(GROUPS[group](flashinfer) for group in groups):
        try:
            record["rows"].append(asdict(measure(pair)))
            write_json(out, record)
        except (AssertionError, RuntimeError, ValueError):
            traceback.print_exc()
            failed.append(f"{pair.op} ({pair.shape})")
        torch.cuda.empty_cache()
    print(table(record))
    return failed


if __name__ == "__main__":
    main()
