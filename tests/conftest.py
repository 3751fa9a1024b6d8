"""Runs Triton kernels in the interpreter where there is no CUDA device, fixes the seeds, and keeps what
starts Ray in one process when pytest-xdist spreads the tests over several."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

# Tensors here are small: a second thread waits more than it computes, and takes the other processes' core.
torch.set_num_threads(1)

STARTS_RAY = {"cluster", "served"}
"""Fixtures. One Ray after the other: they share fixed ports and the machine's shared memory."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if STARTS_RAY & {*getattr(item, "fixturenames", ())}:
                item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
