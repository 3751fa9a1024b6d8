"""The states of sequences beside their pages, in slots of a fixed size: those of linear attention, or rolling
buffers (`rolling_buffers.py`).

Shape suffixes as in `kernels.gated_delta.states`, and L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltafront.kernels.gated_delta.states import LayerStates
from deltafront.workers.kv.host_copies import as_numpy, as_tensor

State = tuple[torch.Tensor, ...]
"""The tensors of a slot, each [layers, …]."""


@dataclass(frozen=True)
class Heads:
    """The heads in a tensor of a state, which tensor-parallel ranks share. Rank r has part r of each section
    of the whole tensor.

    Args:
        axis: The dimension of the heads in a tensor [layers, …].
        widths: The sections' widths along it on one rank.
    """

    axis: int
    widths: tuple[int, ...]

    def parts(self, whole: Any, ranks: int) -> list[Any]:
        """Split a whole array into the ranks' arrays. Raises ValueError if its shape does not fit."""
        if np.ndim(whole) <= self.axis:
            raise ValueError(f"a state's array of shape {np.shape(whole)} has no heads")
        pieces = np.split(whole, np.cumsum([width for width in self.widths for _ in range(ranks)]), self.axis)
        if pieces.pop().size:
            raise ValueError(f"a state's array of {whole.shape} is larger than {ranks} ranks have room for")
        return [np.concatenate(pieces[rank::ranks], self.axis) for rank in range(ranks)]

    def joined(self, parts: Sequence[Any]) -> Any:
        """Join the ranks' arrays. The inverse of `parts`."""
        split = [np.split(part, np.cumsum(self.widths)[:-1], self.axis) for part in parts]
        return np.concatenate([piece for pieces in zip(*split, strict=True) for piece in pieces], self.axis)


class StateCache(ABC):
    """States in slots. Slots are zeroed at first.

    Attributes:
        layers: Indices in the model of the layers that have a state, ascending.
        heads: The heads in each tensor of a state.
    """

    layers: tuple[int, ...]
    heads: tuple[Heads, ...]

    @abstractmethod
    def slot(self, slot: int) -> State:
        """Return views of a slot's tensors."""

    @abstractmethod
    def with_slots(self, slots: int) -> StateCache:
        """Return a cache of `slots` slots. Slot 0 is a copy of this one's."""

    def clear(self, slot: int) -> None:
        """Set a state to that before the first token."""
        for state_L in self.slot(slot):
            state_L.zero_()

    def take(self, slots: Sequence[int], other: StateCache, slot: int) -> None:
        """Copy a state of this or another cache into each of `slots`. On a GPU the copies are only launched.
        Raises ValueError if the other cache has other layers."""
        if other.layers != self.layers:
            raise ValueError(f"a state of layers {other.layers} does not fit layers {self.layers}")
        for target in slots:
            for to_L, from_L in zip(self.slot(target), other.slot(slot), strict=True):
                to_L.copy_(from_L)

    def to_host(self, slot: int) -> State:
        """Copy a state into host memory. On a GPU the copies are only launched."""
        return tuple(state_L.to("cpu", non_blocking=True, copy=True) for state_L in self.slot(slot))

    def parts(self, arrays: Sequence[Any], ranks: int) -> list[tuple[Any, ...]]:
        """Split a whole state's arrays into those of each rank. Raises ValueError if they do not fit."""
        self._check_count(arrays)
        if ranks == 1:
            return [tuple(arrays)]
        each = (heads.parts(array, ranks) for heads, array in zip(self.heads, arrays, strict=True))
        return list(zip(*each, strict=True))

    def _check_count(self, arrays: Sequence[Any]) -> None:
        if len(arrays) != len(self.heads):
            raise ValueError(f"a state has {len(self.heads)} arrays, and {len(arrays)} came")

    def joined(self, parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Join the arrays of all ranks into those of the whole state."""
        if len(parts) == 1:
            return tuple(parts[0])
        of_ranks = zip(*parts, strict=True)
        return tuple(heads.joined(one) for heads, one in zip(self.heads, of_ranks, strict=True))

    @torch.inference_mode()
    def write(self, slots: Sequence[int], layers: Sequence[int], arrays: Sequence[Any]) -> None:
        """Write the state of some layers, as host arrays from `packed`, into each of `slots`. On a GPU call
        it in `PagedKVCache.moving`.

        Raises:
            ValueError: Layers, shapes or dtypes differ from this cache's.
        """
        rows = [self.layers.index(layer) for layer in layers]
        self._check_count(arrays)
        given = [
            as_tensor(array, (len(rows), *state_L.shape[1:]), state_L.dtype)
            for state_L, array in zip(self.slot(0), arrays, strict=True)
        ]
        for slot in slots:
            for to_L, from_L in zip(self.slot(slot), given, strict=True):
                for row, state in zip(rows, from_L, strict=True):
                    to_L[row].copy_(state)


class LinearStates(StateCache):
    """The states of linear-attention layers.

    Args:
        conv_shape, recurrent_shape: Shapes of a layer's state (`LinearConfig`).
        dtype: The model's dtype.
    """

    def __init__(
        self,
        layers: Sequence[int],
        conv_shape: tuple[int, ...],
        recurrent_shape: tuple[int, ...],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        shape = slots, len(self.layers)
        self.conv_SLWE = torch.zeros((*shape, *conv_shape), dtype=dtype, device=device)
        self.recurrent_SLHKD = torch.zeros((*shape, *recurrent_shape), dtype=torch.float32, device=device)
        channels, (heads, _keys, dim) = conv_shape[-1], recurrent_shape
        keys = (channels - heads * dim) // 2
        self.heads = Heads(2, (keys, keys, heads * dim)), Heads(1, (heads,))

    def layer(self, layer: int) -> LayerStates:
        """Return a layer's states. Raises ValueError if it is not one of `layers`."""
        index = self.layers.index(layer)
        return LayerStates(self.conv_SLWE[:, index], self.recurrent_SLHKD[:, index])

    def slot(self, slot: int) -> State:
        return self.conv_SLWE[slot], self.recurrent_SLHKD[slot]

    def with_slots(self, slots: int) -> LinearStates:
        shapes = tuple(self.conv_SLWE.shape[2:]), tuple(self.recurrent_SLHKD.shape[2:])
        other = LinearStates(self.layers, *shapes, slots, self.conv_SLWE.dtype, self.conv_SLWE.device)
        other.take([0], self, 0)
        return other


def packed(state: State | None) -> tuple[Any, ...]:
    """Return a state's arrays for `HandedState`, which Ray sends without a copy. None: nothing to send."""
    return () if state is None else tuple(map(as_numpy, state))
