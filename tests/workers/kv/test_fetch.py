"""Tests KV that a stage fetches from a decode worker: its pieces, refusals, and Ray's errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltafront.workers.kv import fetch
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.fetch import NoKVSource, RayKVSource, from_host, pieces, to_host
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.messages.stages import HostKV, KVRange


def cache_of(dtype: torch.dtype = torch.float32, layers: range = range(2, 4)) -> PagedKVCache:
    return PagedKVCache(layers, 2, 8, 12, dtype, "cpu")


def test_fetched_kv_pieces_are_bounded_and_cover_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE_BYTES", 40 * 2 * 2 * 8 * 4)
    wanted = list(pieces("a", cache_of(), 100))
    assert [(one.layer, one.start, one.tokens) for one in wanted] == [
        (layer, start, tokens) for layer in (2, 3) for start, tokens in ((0, 40), (40, 40), (80, 20))
    ]
    assert list(pieces("a", cache_of(), 0)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kv_copied_to_the_host_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    """The pages on both sides are scattered."""
    arguments, there, wanted = (
        cache_of(dtype),
        cache_of(dtype),
        KVRange(request_id="a", layer=3, start=5, tokens=40),
    )
    k_TGD, v_TGD = (torch.randn(50, 2, 8).to(dtype) for _ in "kv")
    arguments.write_layers((7, 2, 9, 4), 0, {3: (k_TGD, v_TGD)})
    back = from_host(to_host(arguments, (7, 2, 9, 4), wanted), wanted, there)
    there.write_layers((1, 0, 5), wanted.start, {3: back})
    found = there.read(3, (1, 0, 5), 5, 40)
    assert all(torch.equal(x, y[5:45]) for x, y in zip(found, (k_TGD, v_TGD), strict=True))


@pytest.mark.parametrize(
    "array", [np.zeros((3, 2, 8), np.float16), np.zeros((4, 2, 8), np.float32), "nothing"]
)
def test_refuses_kv_of_another_shape_or_dtype(array: Any) -> None:
    good = np.zeros((3, 2, 8), np.float32)
    with pytest.raises(HandoffError, match="KV of a came back as"):
        from_host(HostKV(k=good, v=array), KVRange(request_id="a", layer=2, start=0, tokens=3), cache_of())


@pytest.mark.parametrize("scales", [(), (np.zeros((3, 2), np.uint8),), (np.zeros((3, 2), np.int8),) * 2])
def test_refuses_8_bit_kv_without_its_scales(scales: tuple[Any, ...]) -> None:
    cache = PagedKVCache(range(2, 4), 2, 8, 12, torch.bfloat16, "cpu", int8=True)
    numbers = np.zeros((3, 2, 8), np.uint8)
    kv, wanted = (
        HostKV(k=numbers, v=numbers, scales=scales),
        KVRange(request_id="a", layer=2, start=0, tokens=3),
    )
    with pytest.raises(HandoffError, match="KV of a came back as"):
        from_host(kv, wanted, cache)
    with pytest.raises(HandoffError, match="came back as 4 arrays, not 2"):
        from_host(HostKV(k=numbers, v=numbers, scales=(numbers,) * 2), wanted, cache_of())


class FakeRay:
    """An actor whose `kv` returns its argument. `fails` replaces the n-th answer."""

    def __init__(self, fails: dict[int, Exception]) -> None:
        self.fails = fails
        self.kv = self
        self.sent: list[KVRange] = []
        self.most = 0
        self.answered = 0

    def get_actor(self, name: str, namespace: str) -> FakeRay:
        if name == "decode:gone":
            raise ValueError("Failed to look up actor\nwith a traceback")
        return self

    def remote(self, wanted: KVRange) -> KVRange:
        self.sent.append(wanted)
        self.most = max(self.most, len(self.sent) - self.answered)
        return wanted

    def get(self, reply: KVRange, timeout: float) -> KVRange:
        self.answered += 1
        if self.answered in self.fails:
            raise self.fails[self.answered]
        return reply


def source_of(**fails: Exception) -> tuple[RayKVSource, FakeRay]:
    source = RayKVSource(5.0)
    ray = FakeRay({int(name[1:]): error for name, error in fails.items()})
    source._ray = ray
    return source, ray


def test_kv_pieces_arrive_in_order_while_later_ones_are_fetched() -> None:
    source, ray = source_of()
    wanted = [KVRange(request_id="a", layer=layer, start=0, tokens=9) for layer in range(8)]
    assert list(source.fetch("decode:x", iter(wanted))) == [(one, one) for one in wanted]
    assert 1 < ray.most <= 3


def test_dead_decode_worker_fails_the_request_with_one_line() -> None:
    wanted = [KVRange(request_id="a", layer=layer, start=0, tokens=9) for layer in range(8)]
    source, _ray = source_of(n3=RuntimeError("The actor died\nand so on"))
    with pytest.raises(HandoffError, match=r"decode:x gave no KV back: RuntimeError: The actor died$"):
        list(source.fetch("decode:x", iter(wanted)))
    with pytest.raises(
        HandoffError, match=r"decode:gone gave no KV back: ValueError: Failed to look up actor$"
    ):
        list(source.fetch("decode:gone", iter(wanted)))
    with pytest.raises(HandoffError, match="gives no KV back to this group"):
        list(NoKVSource().fetch("decode:x", iter(wanted)))
