"""The KV cache of layers with sliding windows as rolling buffers (Mistral 7B, Jiang et al. 2023, section 2).

A slot holds, for each of these layers, the KV of a sequence's last tokens that a window can still reach.
Token t is in row t mod N of its slot's N rows. Slots consist of whole pages, so decode kernels read them
through a page table in which these pages repeat.

Shape suffixes as in `workers.kv.cache`; R rows of a decode step, P columns of its page table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deltafront.kernels.layers.rope import KVRows
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import PAGE_TOKENS
from deltafront.workers.kv.states import Heads, LinearStates, State, StateCache
from deltafront.workers.model.directory.model_config import ModelConfig


class RollingBuffers(StateCache):
    """Rolling buffers in slots, in the model's dtype.

    Args:
        tokens: N, the rows of a slot: a multiple of the page size (`ModelConfig.rolling_tokens`).
        window: The sliding window in tokens, the current token included.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        tokens: int,
        window: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.tokens, self.window = tokens, window
        self._pages = tokens // PAGE_TOKENS
        self._shape = kv_heads, head_dim
        self.heads = (Heads(3, (kv_heads,)),) * 2
        self.cache = PagedKVCache(self.layers, kv_heads, head_dim, slots * self._pages, dtype, device)

    def slot(self, slot: int) -> State:
        pages = slice(slot * self._pages, (slot + 1) * self._pages)
        return tuple(side_LP[:, pages] for side_LP in self.cache.sides)

    def with_slots(self, slots: int) -> RollingBuffers:
        sizes = *self._shape, self.tokens, self.window
        other = RollingBuffers(self.layers, *sizes, slots, self.cache.dtype, self.cache.device)
        other.take([0], self, 0)
        return other

    def first_seen(self, position: int) -> int:
        """Return the first token of the page in which the window of the token at `position` begins."""
        return max(0, position + 1 - self.window) // PAGE_TOKENS * PAGE_TOKENS

    def rows_of(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Return the rows of tokens start .. end-1 in a slot (rows_T, int64)."""
        return slot * self.tokens + torch.arange(start, end, device=self.cache.device) % self.tokens


class SequenceBuffers:
    """The KV that window layers see and write for tokens start .. end-1 of one sequence.

    In each layer call `kv_rows`, then `seen` once the new KV is written, and `keep`.

    Args:
        first: The slot with the state before token `start`; None: there are no tokens before it.
        cuts: Pairs of a number of tokens and the slot to which the state after them is written.
    """

    def __init__(
        self,
        buffers: RollingBuffers,
        start: int,
        end: int,
        first: int | None,
        cuts: Iterable[tuple[int, int]],
    ) -> None:
        self._buffers = buffers
        begin = start if first is None else buffers.first_seen(start)
        self.before = start - begin
        """Number of tokens before `start` in `seen`."""
        self._old_T = None if first is None or begin == start else buffers.rows_of(first, begin, start)
        cache, rows = buffers.cache, end - begin
        shape = rows, cache.kv_heads, cache.head_dim
        self._k_SGD, self._v_SGD = (
            torch.empty(shape, dtype=cache.dtype, device=cache.device) for _side in "kv"
        )
        self._new_T = torch.arange(self.before, rows, device=cache.device)
        self._cuts = []
        for place, slot in cuts:
            since = max(begin, buffers.first_seen(place))
            self._cuts.append((slice(since - begin, place - begin), buffers.rows_of(slot, since, place)))

    @property
    def window(self) -> int:
        return self._buffers.window

    def has(self, layer: int) -> bool:
        return layer in self._buffers.layers

    def kv_rows(self, layer: int) -> KVRows:
        """Return where the layer's new KV is written, after the KV before it."""
        if self._old_T is not None:
            own = self._k_SGD, self._v_SGD
            for side_R, side_S in zip(self._buffers.cache.rows(layer), own, strict=True):
                torch.index_select(side_R, 0, self._old_T, out=side_S[: self.before])
        return KVRows(self._k_SGD, self._v_SGD, self._new_T)

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views k_GSD, v_GSD: the layer's KV from `before` tokens before `start` on."""
        return self._k_SGD.transpose(0, 1), self._v_SGD.transpose(0, 1)

    def keep(self, layer: int) -> None:
        """Write the layer's part of the states after the cuts."""
        for kept, rows_T in self._cuts:
            for side_R, side_S in zip(
                self._buffers.cache.rows(layer), (self._k_SGD, self._v_SGD), strict=True
            ):
                side_R.index_copy_(0, rows_T, side_S[kept])


class StepBuffers:
    """The rolling buffers of a decode step's rows. Row r has the slot slots_R[r] (int64), and a new token at
    positions_R[r].

    Attributes:
        table_RP: The page table of the window layers (int32).
    """

    def __init__(
        self, buffers: RollingBuffers, slots_R: torch.Tensor, positions_R: torch.Tensor, columns: int
    ) -> None:
        self._cache, pages = buffers.cache, buffers.tokens // PAGE_TOKENS
        self._rows_R = slots_R * buffers.tokens + positions_R % buffers.tokens
        column_P = torch.arange(columns, device=slots_R.device) % pages
        self.table_RP = (slots_R[:, None] * pages + column_P).to(torch.int32)

    def has(self, layer: int) -> bool:
        return layer in self._cache.layers

    def kv_rows(self, layer: int) -> KVRows:
        return self._cache.kv_rows(layer, self._rows_R)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.layer(layer)


def make_states(
    model: ModelConfig, layers: range, slots: int, dtype: torch.dtype, device: torch.device
) -> StateCache | None:
    """Make the states of those of `layers` that have one (`ModelConfig.state_layers`); None: none has."""
    own = tuple(n for n in model.state_layers if n in layers)
    if not own:
        return None
    if (linear := model.linear) is not None:
        return LinearStates(own, linear.conv_shape, linear.recurrent_shape, slots, dtype, device)
    sizes = model.kv_heads, model.head_dim, model.rolling_tokens, model.sliding_window or 0
    return RollingBuffers(own, *sizes, slots, dtype, device)
