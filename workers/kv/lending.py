"""A stage's own pages, lent: a decode worker is told where a chunk's K/V lies, and reads it there itself.

The pages go to another request when `PostingSender.holds` says so; how a decode worker knows that what it
read was still its request's is the transport's business.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..messages.stages import KVAnnouncement
from .cache import PagedKVCache
from .handoff import HandoffError, described
from .pages.pool import row_runs

Runs = tuple[tuple[int, int], ...]
"""(first, count) of a cache's rows: slot s of page p is row p · page_tokens + s."""


@dataclass(frozen=True)
class LentCache:
    """A stage's cache, as another process finds it. layers: those it holds. shape: of k and of v,
    [layers, pages, page_tokens, kv_heads, head_dim]."""

    layers: range
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LentKV:
    """The payload. rows: of the cache, in the order of the chunk's tokens."""

    cache: LentCache
    rows: Runs


class Lender:
    """A `posting.Packer` but for its messages. mark: gives an event of all that was launched so far, None
    where it is done."""

    lends = True

    def __init__(self, cache: PagedKVCache, mark: Callable[[], Any]) -> None:
        self._cache, self._mark = cache, mark
        self._chunk: tuple[Sequence[int], int, int] = ((), 0, 0)
        self._runs: Runs = ()
        """Of that chunk, whose layers come one after the other and lie alike. Looked up for each, they took
        a tenth of the time that launching a chunk takes (docs/LOG.md)."""

    def keep(
        self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, pages: Sequence[int]
    ) -> tuple[Runs, Any]:
        chunk = pages, start, k_TGD.shape[0]
        if chunk != self._chunk:
            self._chunk, self._runs = chunk, row_runs(*chunk, self._cache.page_tokens)
        return self._runs, self._mark()


K = TypeVar("K", bound=LentKV)


def checked(announcement: KVAnnouncement, cache: PagedKVCache, kind: type[K]) -> K:
    """What was announced for `cache`. Raises HandoffError for what is not K/V of this model, or is not what
    the stage holds."""
    kv, what = announcement.payload, described(announcement)
    if not isinstance(kv, kind):
        raise HandoffError(f"{what} is {type(kv).__name__}, not pages of a stage's cache")
    lent = kv.cache
    wanted = (cache.page_tokens, cache.kv_heads, cache.head_dim), str(cache.dtype)
    if (lent.shape[2:], lent.dtype) != wanted:
        raise HandoffError(
            f"{what} is in pages of {lent.shape[2:]} {lent.dtype}, expected {wanted[0]} {wanted[1]}; "
            "prefill and decode workers must run the same model in the same dtype"
        )
    last = announcement.layer + announcement.layers - 1
    rows = sum(count for _, count in kv.rows)
    if announcement.layer not in lent.layers or last not in lent.layers or rows != announcement.tokens:
        raise HandoffError(f"{what} is not what the stage holds: {lent.layers}, {rows} rows")
    return kv


def row_bytes(cache: PagedKVCache) -> int:
    """Of a token's k, or v, in one layer."""
    return cache.kv_heads * cache.head_dim * cache.dtype.itemsize


def moved(announcement: KVAnnouncement, layers: Sequence[int], cache: PagedKVCache) -> int:
    """Bytes of these layers of what was announced."""
    return 2 * announcement.tokens * len(layers) * row_bytes(cache)


def too_late(announcement: KVAnnouncement) -> HandoffError:
    """For what was read when the pages may have been somebody else's."""
    return HandoffError(f"{described(announcement)} was read too late: its stage no longer kept it")
