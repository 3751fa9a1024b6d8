"""Runs Triton kernels in the interpreter where there is no CUDA device, fixes the seeds, and says
what pytest-xdist must keep in one process."""

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

TOGETHER = {
    "tests/deploy/test_cluster.py": "the service",
    "tests/e2e/": "the service",
    "tests/service/test_served.py": "the service",
    "tests/workers/decode/test_decode_worker.py": "actors",
    "tests/workers/prefill/test_prefill_group.py": "actors",
    "tests/kernels/test_compile_sm90.py": "compiler",
}
"""What runs in one process, one test after the other. The service has fixed ports. Bare actors start a Ray of
their own, which may stand beside the service's; the compiler's process is started once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--acceptance", action="store_true", help="run tests/e2e at full size")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The end-to-end tests last: their service stands until the end, on ports that others need before."""
    items.sort(key=lambda item: item.nodeid.startswith("tests/e2e/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The groups of TOGETHER first, the longest before the others; every other test is a piece of its own."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((TOGETHER[start] for start in TOGETHER if nodeid.startswith(start)), nodeid)

    return Together(config, log)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
