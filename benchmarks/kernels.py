"""Checks and times every kernel on one GPU, then prints a table and writes JSON.

    python -m deltafront.benchmarks.kernels

The result, {"gpu", "commit", "torch", "triton", "rows"}, replaces benchmarks/results/kernels_h200.json. A run
of some cases alone writes only to the file of --out. The file is written after every case, so an interrupted
run keeps its rows.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.harness import BenchConfig, Row, commit_of, run_cases, write_rows

MODULES = ("cases_attention", "cases_selection", "cases_decode", "cases_experts")
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; all by default")
    parser.add_argument("--modules", nargs="*", default=list(MODULES), choices=MODULES)
    parser.add_argument("--seed", type=int, default=0, help="of every input, checks included")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    args = parser.parse_args()
    if (args.only or set(args.modules) != set(MODULES)) and args.out is None:
        parser.error("--only, --modules: --out is needed, since the table is of all cases")
    out = args.out or ROOT / "benchmarks" / "results" / "kernels_h200.json"
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    config = BenchConfig(
        device=torch.device("cuda"), tokens=args.tokens, seed=args.seed, only=frozenset(args.only)
    )
    rows: list[Row] = []
    commit = args.commit or commit_of(ROOT)

    def keep(row: Row) -> None:
        rows.append(row)
        write_rows(out, rows, commit)

    found = [import_module(f".{name}", __package__).cases(config) for name in args.modules]
    if unknown := config.only - {case.name for cases in found for case in cases}:
        parser.error(f"--only: no case of these modules is called {', '.join(sorted(unknown))}")
    for cases in found:
        run_cases(cases, config, keep)
    print(f"wrote {out}" if rows else "nothing was measured")


if __name__ == "__main__":
    main()
