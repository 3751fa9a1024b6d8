"""A stage's own pages, exported: a decode worker learns where a chunk's K/V lies and reads it there itself.

The pages go to another request once `MessageStream.close` says so. How a decode worker knows that it read the
right request's K/V is each transport's business.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...messages.stages import KVAnnouncement
from ..cache import PagedKVCache
from ..pages.pool import row_runs
from .protocols import HandoffError, described

Runs = tuple[tuple[int, int], ...]
"""(first, count) of a cache's rows: slot s of page p is row p · page_tokens + s."""


@dataclass(frozen=True)
class ExportedCache:
    """A stage's cache, as another process finds it. layers: those it holds. shape: of k and of v,
    [layers, pages, page_tokens, kv_heads, head_dim]."""

    layers: range
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ExportedKV:
    """The payload. rows: of the cache, in the order of the chunk's tokens."""

    cache: ExportedCache
    rows: Runs


class PageExport:
    """The part of a `stream.KVExport` that transports over exported pages share. mark: returns a CUDA event
    after everything launched so far, or None where that is done."""

    def __init__(self, cache: PagedKVCache, pages: Sequence[int], mark: Callable[[], Any]) -> None:
        self._cache, self._pages, self._mark = cache, pages, mark
        self._chunk = 0, 0
        self._runs: Runs = ()
        """Rows of that chunk, the same in all layers. Computed for each layer they took a tenth of the time
        to launch a chunk."""

    def layer(self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> tuple[Runs, Any]:
        chunk = start, k_TGD.shape[0]
        if chunk != self._chunk:
            self._chunk, self._runs = chunk, row_runs(self._pages, *chunk, self._cache.page_tokens)
        return self._runs, self._mark()


K = TypeVar("K", bound=ExportedKV)


def checked(announcement: KVAnnouncement, cache: PagedKVCache, kind: type[K]) -> K:
    """The payload of an announcement for `cache`. Raises HandoffError if it is not K/V of this model, or is
    not what the stage holds."""
    kv, what = announcement.payload, described(announcement)
    if not isinstance(kv, kind):
        raise HandoffError(f"{what} is {type(kv).__name__}, not pages of a stage's cache")
    exported = kv.cache
    wanted = (cache.page_tokens, cache.kv_heads, cache.head_dim), str(cache.dtype)
    if (exported.shape[2:], exported.dtype) != wanted:
        raise HandoffError(
            f"{what} is in pages of {exported.shape[2:]} {exported.dtype}, expected {wanted[0]} {wanted[1]}; "
            "prefill and decode workers must run the same model in the same dtype"
        )
    last = announcement.layer + announcement.layers - 1
    rows = sum(count for _, count in kv.rows)
    held = announcement.layer in exported.layers and last in exported.layers
    if not held or rows != announcement.tokens:
        raise HandoffError(f"{what} is not what the stage holds: {exported.layers}, {rows} rows")
    return kv


def row_bytes(cache: PagedKVCache) -> int:
    """Bytes of one token's k, or v, in one layer."""
    return cache.kv_heads * cache.head_dim * cache.dtype.itemsize


def moved_bytes(announcement: KVAnnouncement, layers: Sequence[int], cache: PagedKVCache) -> int:
    """Bytes of these layers of what was announced."""
    return 2 * announcement.tokens * len(layers) * row_bytes(cache)


def too_late(announcement: KVAnnouncement) -> HandoffError:
    """The error for K/V that was read when the pages may have been another request's."""
    return HandoffError(f"{described(announcement)} was read too late: its stage no longer kept it")
