"""The KV transports, by name.

To add a transport, write a file with a `KVSender` and a `KVReader`, add it to `TRANSPORTS`, and add its
name to `HandoffConfig`.
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
    """The functions that make a transport's sender (for a stage) and its reader (for a decode worker).

    `rank_sender` makes the sender for tensor-parallel decode workers. It also takes the ranks of a decode
    worker and the tokens of the longest chunk. None: `sender` serves any number of ranks.
    """

    sender: Callable[[HandoffConfig, PagedKVCache], KVSender]
    reader: Callable[[HandoffConfig, PagedKVCache, Executor], KVReader]
    rank_sender: Callable[[HandoffConfig, PagedKVCache, int, int], KVSender] | None = None


TRANSPORTS: dict[str, Transport] = {
    "object_store": Transport(object_store.sender, object_store.reader),
    "cuda_ipc": Transport(cuda_ipc.sender, cuda_ipc.reader),
    "nixl": Transport(nixl.sender, nixl.reader, nixl.rank_sender),
    "mapped": Transport(mapped.sender, mapped.reader),
}


def kv_sender(
    config: HandoffConfig, cache: PagedKVCache, *, ranks: int = 1, chunk_tokens: int = 0
) -> KVSender:
    """Make a stage's sender for the configured transport.

    Args:
        ranks: Number of tensor-parallel ranks of each decode worker.
        chunk_tokens: Number of tokens of the longest chunk.
    """
    transport = _named(config.transport)
    if ranks > 1 and transport.rank_sender is not None:
        return transport.rank_sender(config, cache, ranks, chunk_tokens)
    return transport.sender(config, cache)


def kv_reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> KVReader:
    """Make a decode worker's reader. `thread` runs its writes to `cache`."""
    return _named(config.transport).reader(config, cache, thread)


def _named(name: str) -> Transport:
    if name not in TRANSPORTS:
        raise ValueError(f"KV transport {name!r} is unknown; known: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]
