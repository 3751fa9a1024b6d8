"""Tests that threads which compute on a CPU run with lower priority than threads that answer requests."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deltafront.workers.model.decoder.load import set_up_compute_thread


def niceness() -> int:
    """Return the niceness of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_raises_the_niceness_only_of_threads_that_compute_on_a_cpu(device: str) -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=set_up_compute_thread, initargs=(1, device)) as pool:
        yields = pool.submit(niceness).result() > before
        assert pool.submit(torch.get_num_threads).result() == 1
    assert yields == (device == "cpu")
    assert niceness() == before


def test_compute_thread_never_exceeds_the_highest_nice_value(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda _which, _who: 17)
    monkeypatch.setattr(os, "setpriority", lambda _which, _who, nice: given.append(nice))
    monkeypatch.setattr(sys, "platform", "linux")
    with ThreadPoolExecutor(1, initializer=set_up_compute_thread, initargs=(1, "cpu")) as pool:
        pool.submit(niceness).result()
    assert given == [19]
