"""Measures the service's overhead: TTFT over gRPC compared with the same prefill in one process.

    python -m deltafront.benchmarks.service_overhead [--config deploy/config/demo.yaml] [--repeats 3]

Both have the same prompt, chunks, method and number of threads. `in_process` runs twice: as one stage with
all threads, and with the service's stages as threads of one process that pass activations by queue. Neither
uses Ray, gRPC or a KV hand-off. The overhead is the ratio of medians. The script also measures the resident
memory of the service's processes. It prints a table and writes benchmarks/results/service_overhead.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import struct
from pathlib import Path

import psutil
import torch

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.reader import load_tokenizer
from deltafront.benchmarks.streams import ending
from deltafront.kernels.methods import method_spec
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.config import ServiceConfig, load
from deltafront.service.local.server_process import LocalService
from deltafront.service.request.answers import GenerateFinished
from deltafront.tests.workers.in_process import run_in_process
from deltafront.workers.settings import PrefillConfig

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "service_overhead.json"


def in_one_process(config: ServiceConfig, prefill: PrefillConfig, ids: list[int], method: str) -> float:
    """Return the seconds from the job's arrival to the last logits, without the time to load the model."""
    packed = struct.pack(f"<{len(ids)}I", *ids)
    report, _ = run_in_process(config.model, prefill, packed, method_spec(method))
    return report.queue + report.wall


def over_grpc(client: DeltafrontClient, ids: list[int], method: str) -> float:
    events = client.generate(ids, method=method, max_tokens=1, ignore_eos=True, skip_cache=True)
    return ending(events, GenerateFinished).timings.ttft_seconds


def resident_gib(pid: int) -> float:
    parent = psutil.Process(pid)
    return float(sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True)))) / 2**30


def measure(
    path: Path, config: ServiceConfig, lengths: list[int], repeats: int, method: str
) -> dict[str, object]:
    ids = load_tokenizer(config.model.path).encode(DEMO_TEXT.read_text()).ids
    threads = config.prefill.threads * config.prefill.stages
    one_stage = dataclasses.replace(config.prefill, stages=1, threads=threads)
    times: dict[tuple[str, int], list[float]] = {}
    with LocalService(path) as service, DeltafrontClient(service.address) as client:
        over_grpc(client, ids[:512], method)
        for length in lengths:
            times["service", length] = [over_grpc(client, ids[:length], method) for _ in range(repeats)]
        memory = resident_gib(service.pid)
    for length in lengths:
        for name, prefill in (("one stage", one_stage), ("same stages", config.prefill)):
            runs = [in_one_process(config, prefill, ids[:length], method) for _ in range(repeats)]
            times[name, length] = runs
    rows = []
    for length in lengths:
        served = statistics.median(times["service", length])
        row: dict[str, object] = {"tokens": length, "service_s": round(served, 3)}
        for name in ("one stage", "same stages"):
            median = statistics.median(times[name, length])
            row[f"{name.replace(' ', '_')}_s"] = round(median, 3)
            row[f"over_{name.replace(' ', '_')}"] = round(served / median - 1, 4)
        rows.append(row)
    return {"rows": rows, "resident_gib": round(memory, 2)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "deploy" / "config" / "demo.yaml")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--method", default="dense")
    arguments = parser.parse_args()
    config = load(arguments.config)
    measured = measure(arguments.config, config, arguments.tokens, arguments.repeats, arguments.method)
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "commit": commit_of(ROOT),
        "torch": torch.__version__,
        "method": arguments.method,
        "repeats": arguments.repeats,
        **measured,
    }
    write_json(RESULT, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
