"""The ways K/V can take from a stage to a decode worker: `HandoffConfig.transport` names one of these.

A further one is one more file with a `Sender` and a `Receiver` (`handoff.py` says what each promises), one
more line here, and its name in `HandoffConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from ..settings import HandoffConfig
from . import cuda_ipc, in_process, nixl, object_store
from .cache import PagedKVCache
from .handoff import Receiver, Sender, Sink


@dataclass(frozen=True)
class Transport:
    """How to make the two ends."""

    sender: Callable[[HandoffConfig, PagedKVCache, Sink | None], Sender]
    receiver: Callable[[HandoffConfig, PagedKVCache, Executor], Receiver]


TRANSPORTS: dict[str, Transport] = {
    "object_store": Transport(object_store.sender, object_store.receiver),
    "cuda_ipc": Transport(cuda_ipc.sender, cuda_ipc.receiver),
    "nixl": Transport(nixl.sender, nixl.receiver),
    "in_process": Transport(in_process.sender, in_process.receiver),
}


def sender(config: HandoffConfig, cache: PagedKVCache, sink: Sink | None = None) -> Sender:
    """A stage's end, for K/V that is in `cache`. sink: the decode worker, where it is in this process."""
    return _named(config.transport).sender(config, cache, sink)


def receiver(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> Receiver:
    """A decode worker's end. thread: where writes to `cache` run, one after the other."""
    return _named(config.transport).receiver(config, cache, thread)


def _named(name: str) -> Transport:
    """Raises ValueError for an unknown one."""
    if name not in TRANSPORTS:
        raise ValueError(f"K/V transport {name!r} is unknown; known: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]
