"""Compares our one-shot all-reduces with FlashInfer's and NCCL's over two GPUs, and prints a table of times.

    python -m deltafront.benchmarks.beside_flashinfer.all_reduce

Inputs are bf16, as wide as hidden states of Llama-3.1-8B and 70B. Outputs are compared with a float32
reference, then each pair is timed: microseconds per call, medians over replays of a CUDA graph, of the slower
rank. FlashInfer's kernels (TensorRT-LLM's) are timed without and with programmatic dependent launch (PDL).
Their memory is shared by CUDA IPC, never by NVLink multicast. NCCL adds and norms with our separate kernel.

The script writes benchmarks/results/beside_flashinfer_all_reduce.json: {"gpu", "commit", "torch", "triton",
"flashinfer", "rows"}. `ratio` is FlashInfer's faster time over ours: above 1, ours is faster. `difference` is
the largest difference of FlashInfer's outputs from ours. NCCL's times are written before FlashInfer compiles.
If a part fails or hangs, the script prints the error and exits with 1.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch.multiprocessing.spawn import spawn

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.beside_flashinfer.pairs import CONFIG, Pair, Run, close, copied, draw, measure
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.markdown import Result, markdown, provenance
from deltafront.kernels.layers.norm import add_norm
from deltafront.workers.decode.ranks import one_shots

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "beside_flashinfer_all_reduce.json"
OPERATIONS = "all-reduce", "all-reduce, add, RMS norm"
RANKS, COPIES, EPS = 2, 16, 1e-5
ROWS, WIDTHS = (1, 8, 32, 64), (4096, 8192)


@dataclass(frozen=True)
class Inputs:
    """Copies (N) of the inputs. The updates, which are summed, differ between ranks."""

    hidden_NTC: torch.Tensor
    update_NTC: torch.Tensor
    weight_C: torch.Tensor

    @classmethod
    def of(cls, rank: int, rows: int, width: int) -> Inputs:
        torch.manual_seed(CONFIG.seed)
        hidden_NTC, weight_C = draw(COPIES, rows, width), draw(width)
        torch.manual_seed(CONFIG.seed + 1 + rank)
        return cls(hidden_NTC, draw(COPIES, rows, width), weight_C)

    def references(self) -> Sequence[Sequence[torch.Tensor]]:
        """Compute each operation's outputs for the first copy in float32. All ranks must call this."""
        parts = [torch.empty_like(self.update_NTC[0]) for _ in range(RANKS)]
        dist.all_gather(parts, self.update_NTC[0])
        update_TC = torch.stack(parts).float().sum(0)
        sum_TC = self.hidden_NTC[0].float() + update_TC
        return [update_TC], [sum_TC, torch.rms_norm(sum_TC, sum_TC.shape[1:], self.weight_C.float(), EPS)]


def ours(one_shot: Any, x: Inputs) -> tuple[Run, Run]:
    reduce, fused = one_shot
    norm = partial(fused, weight_C=x.weight_C, eps=EPS, fp8=False)
    return lambda i: reduce(x.update_NTC[i], maximum=False), lambda i: norm(x.hidden_NTC[i], x.update_NTC[i])


def nccl(x: Inputs) -> tuple[Run, Run]:
    in_place_NTC = x.update_NTC.clone(), x.update_NTC.clone()  # for each operation; overflows when timed

    def reduce(op: int, i: int) -> torch.Tensor:
        dist.all_reduce(in_place_NTC[op][i])
        return in_place_NTC[op][i]

    return partial(reduce, 0), lambda i: add_norm(x.hidden_NTC[i], reduce(1, i), x.weight_C, EPS, fp8=False)


def flashinfer(workspace: Any, pdl: bool, x: Inputs) -> tuple[Run, Run]:
    from flashinfer.comm import AllReduceFusionPattern as Pattern
    from flashinfer.comm import allreduce_fusion

    launch = {"workspace": workspace, "launch_with_pdl": pdl, "fp32_acc": True}

    def fused(i: int) -> Sequence[torch.Tensor]:
        sum_TC, normed_TC = torch.empty_like(x.hidden_NTC[i]), torch.empty_like(x.hidden_NTC[i])
        outputs = {"residual_out": sum_TC, "norm_out": normed_TC}
        inputs = {"residual_in": x.hidden_NTC[i], "rms_gamma": x.weight_C, "rms_eps": EPS}
        allreduce_fusion(x.update_NTC[i], pattern=Pattern.kARResidualRMSNorm, **launch, **outputs, **inputs)
        return sum_TC, normed_TC

    return lambda i: allreduce_fusion(x.update_NTC[i], pattern=Pattern.kAllReduce, **launch), fused


def compile_flashinfer() -> None:
    from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

    get_trtllm_comm_module()


def make_workspace(rank: int) -> Any:
    """Make FlashInfer's workspace, with its shared buffers in CUDA IPC memory instead of symmetric memory."""
    from flashinfer import comm

    def allocate(size: int, *_: Any) -> tuple[list[int], None, None]:
        places = comm.create_shared_buffer(size)
        comm.CudaRTLibrary().cudaMemset(ctypes.c_void_p(places[rank]), 0, size)
        return places, None, None

    with (
        mock.patch("flashinfer.comm.allreduce.is_confidential_compute", lambda: True),
        mock.patch("flashinfer.comm.trtllm_ar._alloc_symm_buffer_bytes", allocate),
    ):
        create = comm.create_allreduce_fusion_workspace
        return create("trtllm", RANKS, rank, max(ROWS), max(WIDTHS), CONFIG.dtype)


def _pairs(rank: int, own: Any, others: Mapping[str, Any]) -> Iterator[tuple[str, Pair]]:
    for width, rows in itertools.product(WIDTHS, ROWS):
        x = Inputs.of(rank, rows, width)
        references = x.references()
        for name, other in others.items():
            for op, run, theirs, wanted in zip(OPERATIONS, own(x), other(x), references, strict=True):
                differ = partial(_differ, run, theirs, wanted)
                yield name, Pair(op, f"{rows} x {width}", run, theirs, COPIES, differ)


def _differ(run: Run, theirs: Run, reference: Sequence[torch.Tensor]) -> float:
    """Compare the outputs of one call with the reference. Return the largest difference of the two runs."""
    outputs = copied(run(0)), copied(theirs(0))
    for x, y, expected in zip(*outputs, reference, strict=True):
        close(x, expected)
        close(y, expected)
    return max(close(x, y) for x, y in zip(*outputs, strict=True))


def _on_all(work: Callable[[], Any]) -> list[Any] | None:
    """Run `work`, and gather the ranks' results. Return None if a rank failed; its error is printed."""
    own: tuple[bool, Any] = False, None
    try:
        own = True, work()
    except Exception:
        print(f"rank {dist.get_rank()}: {traceback.format_exc()}", flush=True)
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, own)
    return [result for _, result in found] if all(done for done, _ in found) else None


def _measure_all(pairs: Iterator[tuple[str, Pair]], out: Path, record: Result) -> list[str]:
    """Measure pairs. Rank 0 writes every row at once. Return what failed."""
    failed = []
    for name, pair in pairs:
        differ = pair.compare and _on_all(pair.compare)
        measured = differ and _on_all(partial(measure, replace(pair, compare=lambda: 0.0)))
        if not differ or not measured:
            failed.append(f"{name}: {pair.op} ({pair.shape})")
            continue
        row = record["rows"].setdefault((pair.op, pair.shape), {"op": pair.op, "shape": pair.shape})
        ours_us = max(each.ours_us for each in measured)
        row["ours_us"] = min(ours_us, row.get("ours_us", ours_us))
        row[f"{name}_us"] = max(each.flashinfer_us for each in measured)
        if theirs := [row[key] for key in row if key.startswith("flashinfer")]:
            row |= {"ratio": min(theirs) / row["ours_us"], "difference": max(differ)}
        if dist.get_rank() == 0:
            write_json(out, {**record, "rows": [*record["rows"].values()]})
    return failed


def _rank(rank: int, folder: str, seconds: float, out: Path, record: Result) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/ranks", timedelta(seconds=seconds), RANKS, rank)
    own = partial(ours, one_shots(rank, RANKS, torch.device("cuda", rank)))
    failed = _measure_all(_pairs(rank, own, {"nccl": nccl}), out, record)
    made: list[Any] = []
    compiled = _on_all(int if rank else compile_flashinfer)  # the other rank waits, then loads the module
    if compiled and _on_all(lambda: made.append(make_workspace(rank))):
        theirs = {f"flashinfer{'_pdl' * pdl}": partial(flashinfer, made[0], pdl) for pdl in (False, True)}
        failed += _measure_all(_pairs(rank, own, theirs), out, record)
    else:
        failed.append("FlashInfer")
    dist.destroy_process_group()
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _run_ranks(seconds: float, out: Path, record: Result) -> None:
    """Run both ranks. None is left running. Raises TimeoutError after `seconds`, or a failed rank's error."""
    start, end = cast(Any, spawn), time.monotonic() + seconds  # untyped in torch
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(_rank, (folder, seconds, out, {**record, "rows": {}}), RANKS, join=False)
        try:
            while not ranks.join(max(0.1, end - time.monotonic())):
                if time.monotonic() > end:
                    raise TimeoutError(f"the ranks have not finished after {seconds} s")
        finally:
            for process in ranks.processes:
                process.kill()


def table(result: Result) -> str:
    header = "operation,shape,ours µs,FlashInfer µs,PDL µs,NCCL µs,ratio,largest difference".split(",")
    times = dict.fromkeys(("ours_us", "flashinfer_us", "flashinfer_pdl_us", "nccl_us"), ".1f")
    formats = {"op": "", "shape": "", **times, "ratio": ".2f", "difference": ".2g"}
    rows = [
        [format(row.get(key, ""), of if key in row else "") for key, of in formats.items()]
        for row in result["rows"]
    ]
    return markdown(header, rows) + provenance(result)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of time (%(default)s)")
    args = parser.parse_args()
    if torch.cuda.device_count() < RANKS:
        parser.error(f"needs {RANKS} CUDA devices")
    if importlib.util.find_spec("flashinfer") is None:
        parser.error("needs FlashInfer: pip install flashinfer-python; it compiles its kernels with nvcc")
    gpu, commit = f"{RANKS} x {torch.cuda.get_device_name()}", args.commit or commit_of(ROOT)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    versions["flashinfer"] = importlib.metadata.version("flashinfer-python")
    record: Result = {"gpu": gpu, "commit": commit, **versions, "rows": []}
    write_json(args.out, record)
    try:
        _run_ranks(args.seconds, args.out, record)
    finally:
        print(table(json.loads(args.out.read_text())), flush=True)


if __name__ == "__main__":
    main()
