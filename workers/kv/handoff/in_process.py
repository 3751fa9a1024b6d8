"""The hand-off inside one process. A stage's tensors are copied twice, since nobody tells the stage when they
have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...messages.stages import FirstLogits, KVAnnouncement
from ..cache import PagedKVCache
from .protocols import Destination, HandoffError, UsePages, check_kv, described


class LocalReceiver(Protocol):
    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None: ...


@dataclass(frozen=True)
class DeviceKV:
    """The payload: one layer's chunk. ready: the CUDA event after which it may be read; None on a CPU."""

    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    ready: Any = None


class InProcessSender:
    def __init__(self, receiver: LocalReceiver) -> None:
        self._receiver = receiver

    def open(self, destination: Destination) -> InProcessStream:
        return InProcessStream(destination, self._receiver)


class InProcessStream:
    def __init__(self, destination: Destination, receiver: LocalReceiver) -> None:
        self._to, self._receiver = destination, receiver
        self._failure = ""

    def put(self, layer: int, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> int:
        check_kv(k_TGD, v_TGD)
        payload = DeviceKV(k_TGD.clone(), v_TGD.clone(), _now(k_TGD.device))
        announcement = KVAnnouncement(
            request_id=self._to.request_id,
            layer=layer,
            start=start,
            tokens=k_TGD.shape[0],
            payload=payload,
            attempt=self._to.attempt,
        )
        with self._noting("K/V"):
            self._receiver.announce(announcement)
        return k_TGD.nbytes + v_TGD.nbytes

    def put_logits(self, logits_V: torch.Tensor) -> None:
        with self._noting("logits"):
            message = FirstLogits(
                request_id=self._to.request_id, logits=logits_V.numpy(), attempt=self._to.attempt
            )
            self._receiver.first_logits(message)

    def end_chunk(self) -> Callable[[], None]:
        return self._check

    def close(self) -> bool:
        """The payloads are copies, so nobody reads the pages."""
        self._failure = ""
        return True

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = self._failure or f"{self._to.decode_worker} did not take {what}: {error}"

    def _check(self) -> None:
        if self._failure:
            raise HandoffError(self._failure)


class InProcessReader:
    def __init__(self, cache: PagedKVCache, thread: Executor) -> None:
        self._cache = cache
        self._thread = thread

    async def read(self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages) -> int:
        kv = announcement.payload
        expected = (announcement.tokens, self._cache.kv_heads, self._cache.head_dim)
        if not isinstance(kv, DeviceKV) or kv.k_TGD.shape != expected or kv.v_TGD.shape != expected:
            raise HandoffError(f"{described(announcement)} is not two tensors as expected, {expected}")
        parts = dict.fromkeys(layers, (kv.k_TGD, kv.v_TGD))
        with use_pages() as pages:
            if pages is None:
                return 0
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._cache.write_layers, pages, announcement.start, parts, kv.ready
            )
        return kv.k_TGD.nbytes + kv.v_TGD.nbytes


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
