"""Runs Triton kernels in the interpreter where there is no CUDA device, fixes the seeds, and keeps what
starts Ray in one process when pytest-xdist spreads the tests over several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    from . import interpreter

    interpreter.without_idle_work()

# Tensors here are small: a second thread waits more than it computes, and takes the other processes' core.
torch.set_num_threads(1)

# A busy machine makes an example slow, not wrong.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

STARTS_RAY = (
    "tests/deploy/test_cluster.py",
    "tests/service/test_served.py",
    "tests/workers/decode/test_decode_worker.py",
    "tests/workers/prefill/test_prefill_group.py",
)
"""One Ray after the other: they share fixed ports and the machine's shared memory."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whatever starts Ray is one piece of work, every other test a piece of its own."""
    from xdist.scheduler import LoadScopeScheduling

    class OneRay(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(STARTS_RAY) else nodeid

    return OneRay(config, log)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
