"""Runs Triton kernels in the interpreter where there is no CUDA device, fixes the seeds, and marks what
starts Ray: `make test` runs that one file after the other, while pytest-xdist spreads the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

# Tensors here are small: a second thread waits more than it computes, and takes the other processes' core.
torch.set_num_threads(1)

STARTS_RAY = (
    "tests/service/test_served.py",
    "tests/workers/decode/test_decode_worker.py",
    "tests/workers/prefill/test_prefill_group.py",
)
"""One Ray after the other: they share fixed ports and the machine's shared memory."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(STARTS_RAY):
            item.add_marker("ray")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
