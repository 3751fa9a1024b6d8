"""Compares TTFT of `serve --model DIR` without other flags with TTFT of a configuration written by hand.

It runs on one GPU, or with the tiny shape on a CPU. It prints one line of JSON per start, and the ratio of
the medians.

    python -m deltafront.benchmarks.engine.first_command --tokens 131072
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import torch

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.engine import measure
from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.setup import Setup
from deltafront.service.client import DeltafrontClient
from deltafront.service.local.readiness import SERVING, health

ADDRESS = "127.0.0.1:9000"
START_S = 400.0
OPTIONS = {"share": 0.05, "min_tokens": 0}
"""Options of dpxa with which both starts compute the same number of tiles."""


@contextmanager
def serving(flags: Sequence[str | Path]) -> Iterator[DeltafrontClient]:
    command = [sys.executable, "-m", "deltafront.service.cli.main", "serve", *flags]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        with grpc.insecure_channel(ADDRESS) as channel:
            deadline = time.monotonic() + START_S
            while health(channel) != SERVING:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"serve {' '.join(map(str, flags))} does not serve")
                time.sleep(0.5)
        with DeltafrontClient(ADDRESS) as client:
            yield client
    finally:
        process.terminate()
        process.wait(120)


def first_tokens(flags: Sequence[str | Path], tokens: int, vocabulary: int, repeats: int) -> float:
    """Print and return the median TTFT in seconds, without the first prompt, which compiles kernels."""
    with serving(flags) as client:
        found = [
            measure.first_token(client, measure.random_ids(tokens, vocabulary, seed), "dpxa", OPTIONS)
            for seed in range(repeats + 1)
        ]
    times = [one.timings.ttft_seconds for one in found[1:]]
    print(json.dumps({"flags": list(map(str, flags)), "ttft_s": times, "density": found[-1].density.mean}))
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    shape = replace(SHAPES["8b" if on_gpu else "tiny"], positions=given.tokens + 1024)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if on_gpu else None) as name:
        model = Path(name) / "model"
        write_model(model, shape, torch.device("cuda" if on_gpu else "cpu"))
        how = (
            {"decode_gpu": "mapped", "device": "cuda"} if on_gpu else {"decode_gpu": "none", "device": "cpu"}
        )
        by_hand = Setup(model, shape, given.tokens, chunk_tokens=16_384 if on_gpu else 512, **how)  # type: ignore[arg-type]
        starts: list[list[str | Path]] = [["--config", by_hand.write(Path(name))], ["--model", model]]
        medians = [first_tokens(flags, given.tokens, shape.vocab, given.repeats) for flags in starts]
    gpu = torch.cuda.get_device_name() if on_gpu else "no GPU"
    print(json.dumps({"gpu": gpu, "tokens": given.tokens, "by_hand_s": medians[0], "serve_s": medians[1]}))
    print(f"serve --model takes {medians[1] / medians[0]:.3f} times the time of the configuration by hand")


if __name__ == "__main__":
    main()
