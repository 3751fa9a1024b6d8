"""The KV transports, by name.

To add a transport, write a file with a `KVSender` and a `KVReader`, add a line here, and add its name to
`HandoffConfig`.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff import cuda_ipc, mapped, nixl, object_store
from deltafront.workers.kv.handoff.protocols import KVReader, KVSender
from deltafront.workers.settings import HandoffConfig


@dataclass(frozen=True)
class Transport:
    sender: Callable[[HandoffConfig, PagedKVCache], KVSender]
    reader: Callable[[HandoffConfig, PagedKVCache, Executor], KVReader]


TRANSPORTS: dict[str, Transport] = {
    "object_store": Transport(object_store.sender, object_store.reader),
    "cuda_ipc": Transport(cuda_ipc.sender, cuda_ipc.reader),
    "nixl": Transport(nixl.sender, nixl.reader),
    "mapped": Transport(mapped.sender, mapped.reader),
}


def kv_sender(config: HandoffConfig, cache: PagedKVCache) -> KVSender:
    return _named(config.transport).sender(config, cache)


def kv_reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> KVReader:
    """Make a decode worker's reader. `thread` runs its writes to `cache`."""
    return _named(config.transport).reader(config, cache, thread)


def _named(name: str) -> Transport:
    if name not in TRANSPORTS:
        raise ValueError(f"KV transport {name!r} is unknown; known: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]
