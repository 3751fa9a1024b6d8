"""Tests that uploads to the GPU are complete, do not refill a buffer too early, and keep the order."""

from __future__ import annotations

import threading

import pytest
import torch

from deltafront.workers.model.weights import uploads
from deltafront.workers.model.weights.uploads import Uploads, in_threads


class Event:
    """Imitates a CUDA event of a copy. The copy is under way until `synchronize`."""

    def __init__(self) -> None:
        self.under_way = False

    def record(self, _stream: object) -> None:
        assert not self.under_way, "the buffer was filled while it was being copied"
        self.under_way = True

    def synchronize(self) -> None:
        self.under_way = False


@pytest.mark.parametrize("numbers", [1, 31, 32, 33, 1000])
def test_uploads_every_byte_through_small_buffers(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_BUFFER_BYTES", 64)
    monkeypatch.setattr(uploads, "_pinned", lambda: (torch.empty(64, dtype=torch.uint8), Event()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    copies = Uploads(torch.device("cuda"))
    for _ in range(2):  # in the second round, copies of both buffers are still under way
        source = torch.randn(numbers, 3).to(torch.bfloat16)
        target = torch.full_like(source, float("nan"))
        copies.copy(source, target)
        assert torch.equal(target, source)
    transposed = torch.randn(3, numbers).to(torch.bfloat16).T
    target = torch.full(transposed.shape, float("nan"), dtype=torch.bfloat16)
    copies.copy(transposed, target)
    assert torch.equal(target, transposed)


def test_copies_other_dtypes_and_devices_without_staging_buffers() -> None:
    source = torch.randn(5, 7)
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        target = torch.full((5, 7), float("nan"), dtype=dtype)
        Uploads(torch.device(device)).copy(source, target)
        assert torch.equal(target, source.to(dtype))


def test_thread_pool_keeps_the_order_and_limits_work_ahead() -> None:
    begun: list[int] = []
    may_end = threading.Event()

    def make(number: int) -> int:
        begun.append(number)
        may_end.wait(60)
        return number * number

    made = in_threads(make, range(9), threads=2)
    threading.Timer(0.05, may_end.set).start()
    assert next(made) == 0
    assert max(begun) <= 3, "one more than the threads was asked for beside the first"
    assert list(made) == [number * number for number in range(1, 9)]


def test_thread_pool_raises_the_error_of_a_thread() -> None:
    def make(number: int) -> int:
        if number == 1:
            raise ValueError("layer 1 is missing")
        return number

    with pytest.raises(ValueError, match="layer 1 is missing"):
        list(in_threads(make, range(50), threads=2))
