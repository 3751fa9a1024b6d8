"""The hand-off inside one process: a stage's tensors are copied twice on their device, since nobody tells the
stage when they are in the decode worker's pages.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..messages.stages import FirstLogits, KVAnnouncement
from ..settings import HandoffConfig
from .cache import PagedKVCache
from .handoff import HandoffError, Hold, Sink, check_kv, described


@dataclass(frozen=True)
class DeviceKV:
    """The payload: one layer's chunk. ready: the CUDA event after which it may be read, None on the CPU."""

    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    ready: Any = None


class InProcessSender:
    """Gives the tensors to a sink, on the stage's thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed: dict[str, str] = {}

    def announce(
        self,
        request_id: str,
        decode_worker: str,
        layer: int,
        start: int,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        pages: Sequence[int] = (),
        reading: int = 0,
    ) -> int:
        check_kv(k_TGD, v_TGD)
        payload = DeviceKV(k_TGD.clone(), v_TGD.clone(), _now(k_TGD.device))
        tokens = k_TGD.shape[0]
        try:
            self._sink.announce(KVAnnouncement(request_id, layer, start, tokens, payload, reading=reading))
        except Exception as error:
            self._failed.setdefault(request_id, f"{decode_worker} did not take K/V: {error}")
        return k_TGD.nbytes + v_TGD.nbytes

    def first_logits(
        self, request_id: str, decode_worker: str, logits_V: torch.Tensor, reading: int = 0
    ) -> None:
        try:
            self._sink.first_logits(FirstLogits(request_id, logits_V.numpy(), reading))
        except Exception as error:
            self._failed.setdefault(request_id, f"{decode_worker} did not take logits: {error}")

    def end_chunk(self, request_id: str) -> Callable[[], None]:
        return partial(self._check, request_id)

    def forget(self, request_id: str) -> None:
        self._failed.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """What is given is no part of a page."""
        return False

    def _check(self, request_id: str) -> None:
        if request_id in self._failed:
            raise HandoffError(self._failed[request_id])


class InProcessReceiver:
    """Copies the sender's tensors into pages. Nothing outlives `receive`."""

    def __init__(self, cache: PagedKVCache, thread: Executor) -> None:
        self._cache = cache
        self._thread = thread

    async def receive(self, announcement: KVAnnouncement, layers: Sequence[int], hold: Hold) -> int:
        kv = announcement.payload
        expected = (announcement.tokens, self._cache.kv_heads, self._cache.head_dim)
        if not isinstance(kv, DeviceKV) or kv.k_TGD.shape != expected or kv.v_TGD.shape != expected:
            raise HandoffError(f"{described(announcement)} is not two tensors as expected, {expected}")
        parts = dict.fromkeys(layers, (kv.k_TGD, kv.v_TGD))
        with hold() as pages:
            if pages is None:
                return 0
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._cache.write_layers, pages, announcement.start, parts, kv.ready
            )
        return kv.k_TGD.nbytes + kv.v_TGD.nbytes

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def _now(device: torch.device) -> Any:
    """An event of everything that was launched so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def sender(config: HandoffConfig, cache: PagedKVCache, sink: Sink | None) -> InProcessSender:
    """Raises ValueError without a sink."""
    if sink is None:
        raise ValueError("transport 'in_process' is for a stage and a decode worker in one process")
    return InProcessSender(sink)


def receiver(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> InProcessReceiver:
    return InProcessReceiver(cache, thread)
