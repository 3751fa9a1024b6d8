"""Exports a stage's pages, so that a decode worker can copy KV directly from them.

`MessageStream.close` returns True once another request may use the pages. A decode worker must discard KV
that it copied later; how it detects this depends on the transport.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deltafront.workers.kv.cache import PagedKVCache, Sides, token_bytes
from deltafront.workers.kv.handoff.protocols import HandoffError, described
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, row_runs
from deltafront.workers.messages.stages import KVAnnouncement

Runs = tuple[tuple[int, int], ...]
"""Contiguous rows of `PagedKVCache.rows`, each run as (first row, count)."""


@dataclass(frozen=True)
class ExportedCache:
    """Describes a stage's KV cache.

    Attributes:
        shape: The shape of k and of v, [layers, pages, page_tokens, kv_heads, head_dim].
        dtype: The dtype of k and v; uint8 in an 8-bit cache.
    """

    layers: Sequence[int]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ExportedKV:
    """The payload of an announcement: the rows of the stage's cache that hold the chunk's KV, in the order of
    its tokens."""

    cache: ExportedCache
    rows: Runs


class PageExport:
    """Base class of each `stream.KVExport` that lets decode workers read the stage's own pages. It describes
    KV by cache rows. `mark` is `PeerMemory.mark`."""

    def __init__(self, cache: PagedKVCache, pages: Sequence[int], mark: Callable[[], Any]) -> None:
        self._cache, self._pages, self._mark = cache, pages, mark
        self._chunk = 0, 0
        self._runs: Runs = ()
        """The chunk's rows, computed once for all layers, since computing them takes the host a while."""

    def layer(self, start: int, sides_T: Sides) -> tuple[Runs, Any]:
        chunk = start, sides_T[0].shape[0]
        if chunk != self._chunk:
            self._chunk, self._runs = chunk, row_runs(self._pages, *chunk)
        return self._runs, self._mark()


K = TypeVar("K", bound=ExportedKV)


def checked(announcement: KVAnnouncement, cache: PagedKVCache, kind: type[K]) -> K:
    """Check an announcement's payload against `cache`, and return it as a `kind`.

    Raises:
        HandoffError: The payload's type, page shape or dtype is wrong, or announced rows or layers are
            missing.
    """
    kv, what = announcement.payload, described(announcement)
    if not isinstance(kv, kind):
        raise HandoffError(f"{what} is {type(kv).__name__}, not pages of a stage's cache")
    exported = kv.cache
    wanted = (PAGE_TOKENS, cache.model_heads, cache.head_dim), str(cache.dtype)
    if (exported.shape[2:], exported.dtype) != wanted:
        raise HandoffError(
            f"{what} is in pages of {exported.shape[2:]} {exported.dtype}, expected {wanted[0]} {wanted[1]}; "
            "prefill and decode workers must run the same model in the same dtype"
        )
    last = announcement.layer + announcement.layers - 1
    rows = sum(count for _, count in kv.rows)
    has_layers = announcement.layer in exported.layers and last in exported.layers
    if not has_layers or rows != announcement.tokens:
        raise HandoffError(f"{what} is not what the stage holds: {exported.layers}, {rows} rows")
    return kv


def moved_bytes(announcement: KVAnnouncement, layers: Sequence[int], cache: PagedKVCache) -> int:
    size = token_bytes(cache.kv_heads, cache.head_dim, cache.dtype)
    return announcement.tokens * len(layers) * size


def too_late(announcement: KVAnnouncement) -> HandoffError:
    """Return the error for KV whose pages may have belonged to another request when they were copied."""
    return HandoffError(f"{described(announcement)} was read too late: its stage no longer kept it")
