"""Fetches KV from a decode worker, for a stage that resumes a prompt after its previous prefill group died.

With every transport, this KV is sent as host arrays, in pieces of bounded size.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import ray

from deltafront.workers.kv.cache import PagedKVCache, Sides, row_forms, token_bytes
from deltafront.workers.kv.handoff.protocols import HandoffError, plain
from deltafront.workers.kv.host_copies import as_numpy, as_tensor
from deltafront.workers.messages.stages import HandedState, HostKV, KVRange
from deltafront.workers.messages.states import NAMESPACE
from deltafront.workers.roles import KVReceiver, sent

PIECE_BYTES = 8 << 20
_AHEAD = 3


class KVSource(Protocol):
    def fetch(self, decode_worker: str, wanted: Iterable[KVRange]) -> Iterator[tuple[KVRange, HostKV]]:
        """Yield each requested piece with its KV, in order. Raises HandoffError."""

    def state(self, decode_worker: str, request_id: str) -> HandedState:
        """Return the state with which a prompt continues (`KVReceiver.held_state`). Raises HandoffError."""


def pieces(request_id: str, cache: PagedKVCache, tokens: int) -> Iterator[KVRange]:
    """Cut every layer's first `tokens` tokens into pieces of at most PIECE_BYTES."""
    size = token_bytes(cache.kv_heads, cache.head_dim, cache.dtype)
    piece_tokens = max(1, PIECE_BYTES // size)
    for layer in cache.layers:
        for start in range(0, tokens, piece_tokens):
            yield KVRange(
                request_id=request_id, layer=layer, start=start, tokens=min(piece_tokens, tokens - start)
            )


def to_host(cache: PagedKVCache, pages: Sequence[int], wanted: KVRange) -> HostKV:
    """Copy a piece of KV into host arrays. Raises KVCacheError if it is not in the pages."""
    k, v, *scales = map(as_numpy, cache.read(wanted.layer, pages, wanted.start, wanted.tokens))
    return HostKV(k=k, v=v, scales=tuple(scales))


def from_host(kv: HostKV, wanted: KVRange, cache: PagedKVCache) -> Sides:
    """Return a fetched piece as host tensors, which may be read-only. Raises HandoffError if shapes or dtypes
    differ from the cache's."""
    forms = row_forms(cache.kv_heads, cache.head_dim, cache.dtype)
    arrays = kv.k, kv.v, *kv.scales
    if len(arrays) != len(forms):
        raise HandoffError(f"KV of {wanted.request_id} came back as {len(arrays)} arrays, not {len(forms)}")
    try:
        return tuple(
            as_tensor(array, (wanted.tokens, *shape), kind)
            for array, (shape, kind) in zip(arrays, forms, strict=True)
        )
    except ValueError as error:
        raise HandoffError(f"KV of {wanted.request_id} came back as {error}") from None


class RayKVSource:
    """Fetches KV from decode actors through Ray, and waits at most `timeout_s` for each piece."""

    def __init__(self, timeout_s: float) -> None:
        self._ray = ray
        self._timeout_s = timeout_s

    def fetch(self, decode_worker: str, wanted: Iterable[KVRange]) -> Iterator[tuple[KVRange, HostKV]]:
        coming: deque[tuple[KVRange, Any]] = deque()
        try:
            actor = self._ray.get_actor(decode_worker, namespace=NAMESPACE)
            for piece in wanted:
                coming.append((piece, sent(actor, KVReceiver.kv, piece)))
                if len(coming) >= _AHEAD:
                    yield self._first(coming)
            while coming:
                yield self._first(coming)
        except Exception as error:
            raise HandoffError(f"{decode_worker} gave no KV back: {plain(error)}") from error

    def state(self, decode_worker: str, request_id: str) -> HandedState:
        try:
            actor = self._ray.get_actor(decode_worker, namespace=NAMESPACE)
            reply = sent(actor, KVReceiver.held_state, request_id)
            return cast(HandedState, self._ray.get(reply, timeout=self._timeout_s))
        except Exception as error:
            raise HandoffError(f"{decode_worker} gave no state back: {plain(error)}") from error

    def _first(self, coming: deque[tuple[KVRange, Any]]) -> tuple[KVRange, HostKV]:
        piece, reply = coming.popleft()
        return piece, self._ray.get(reply, timeout=self._timeout_s)


class NoKVSource:
    def fetch(self, decode_worker: str, wanted: Iterable[KVRange]) -> Iterator[tuple[KVRange, HostKV]]:
        raise HandoffError(f"{decode_worker} gives no KV back to this group")

    def state(self, decode_worker: str, request_id: str) -> HandedState:
        raise HandoffError(f"{decode_worker} gives no state back to this group")
