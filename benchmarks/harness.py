"""Checks kernels and times them on one GPU: medians of CUDA event times, written as JSON rows.

A case module (`cases_*.py`) exports `cases(config: BenchConfig) -> list[Case]`. `run_cases` first runs each
check once. Then it prepares, times and frees one case after the other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deltafront.kernels.interface import AttentionInput
from deltafront.tests.reference.structured import structured_input


@dataclass(frozen=True)
class BenchConfig:
    """Parameters of the cases. only: Names of the cases to run; empty: all."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 131_072
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    seed: int = 0
    only: frozenset[str] = frozenset()

    def structured(self, tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> AttentionInput:
        """Return a whole prompt made by `tests.reference.structured`."""
        return structured_input(
            tokens,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Timed:
    """A prepared case. run: Launches the kernels once. flops: Operations of one run, for TFLOP/s."""

    run: Callable[[], object]
    flops: float | None = None
    density: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Case:
    """One row of the results.

    Attributes:
        check: Raises if the kernel is wrong. It runs once for all cases with the same function object.
        over: An earlier case with the same number of tokens. `ratio` is its time divided by this case's.
        unavailable: The reason why the case cannot run here.
    """

    name: str
    tokens: int
    prepare: Callable[[], Timed]
    check: Callable[[], None] | None = None
    over: str | None = None
    unavailable: str | None = None


@dataclass(frozen=True)
class Row:
    """One measured case. The JSON omits fields that are None."""

    case: str
    tokens: int
    ms: float
    tflops: float | None = None
    density: float | None = None
    ratio: float | None = None
    note: str | None = None


def median_ms(run: Callable[[], object], *, budget_ms: float = 600.0, at_least: int = 5) -> float:
    """Return the median time of a run by CUDA events: two warm-up runs, then 5 to 100 runs, about budget_ms
    in all.

    All runs are queued before the host waits, so that launches overlap with runs (unless a run is shorter
    than its launch). A 256 MiB buffer is overwritten between runs, so that no run finds its input in L2.
    """
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    run()
    first = _span(run)
    torch.cuda.synchronize()
    repeats = max(at_least, min(100, int(budget_ms / max(_milliseconds(first), 1e-3))))
    spans = []
    for _ in range(repeats):
        flush.zero_()
        spans.append(_span(run))
    torch.cuda.synchronize()
    return statistics.median(map(_milliseconds, spans))


def _span(run: Callable[[], object]) -> tuple[Any, Any]:
    """Record CUDA events before and after a run, without waiting for them."""
    event: Any = torch.cuda.Event  # untyped in torch
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    run()
    end.record()
    return begin, end


def _milliseconds(span: tuple[Any, Any]) -> float:
    begin, end = span
    return float(begin.elapsed_time(end))


def run_cases(
    cases: Sequence[Case], config: BenchConfig, keep: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Check all cases, then time them. A failed check raises. Each case's row is printed and passed to `keep`
    at once, so that an interrupted run keeps it."""
    wanted = [case for case in cases if not config.only or case.name in config.only]
    checked: set[int] = set()
    for case in wanted:
        if case.check is not None and case.unavailable is None and id(case.check) not in checked:
            checked.add(id(case.check))
            case.check()
            torch.cuda.empty_cache()
    rows: list[Row] = []
    for case in wanted:
        if case.unavailable is not None:
            print(f"{case.name:28s} {case.tokens:>8d}  skipped: {case.unavailable}", flush=True)
            continue
        rows.append(_measure(case, rows))
        print(format_row(rows[-1]), flush=True)
        keep(rows[-1])
        torch.cuda.empty_cache()
    return rows


def _measure(case: Case, earlier: Sequence[Row]) -> Row:
    timed = case.prepare()
    ms = median_ms(timed.run)
    tflops = None if timed.flops is None else timed.flops / ms / 1e9
    base = [row.ms for row in earlier if row.case == case.over and row.tokens == case.tokens]
    ratio = base[-1] / ms if base else None
    return Row(case.name, case.tokens, ms, tflops, timed.density, ratio, timed.note)


def format_row(row: Row) -> str:
    def number(value: float | None, form: str) -> str:
        return format(value, form) if value is not None else "-".rjust(int(form.split(".", maxsplit=1)[0]))

    return (
        f"{row.case:28s} {row.tokens:>8d} {row.ms:10.4f} ms {number(row.tflops, '7.1f')} TFLOP/s "
        f"density {number(row.density, '6.3f')} ratio {number(row.ratio, '6.2f')}  {row.note or ''}"
    )


def commit_of(root: Path) -> str:
    """Return the checked-out commit, with `+` if files differ from it; `unknown` outside git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def write_rows(path: Path, rows: Sequence[Row], commit: str) -> None:
    """Write {"gpu", "commit", "torch", "triton", "rows"} as JSON. Rows omit fields that are None."""
    import triton

    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "commit": commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [{k: v for k, v in asdict(row).items() if v is not None} for row in rows],
    }
    write_json(path, record)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a results file. Create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
