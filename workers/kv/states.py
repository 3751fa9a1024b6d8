"""The states of a process's linear-attention layers, in slots.

Shape suffixes as in `kernels.gated_delta.states`, and L layers.
"""

from collections.abc import Sequence
from typing import Any

import torch

from deltafront.kernels.gated_delta.states import LayerStates
from deltafront.workers.kv.host_copies import as_numpy, as_tensor

State = tuple[torch.Tensor, torch.Tensor]
"""A state in host memory: conv_LWE, recurrent_LHKD."""


class StateCache:
    """States in slots. Slots are zeroed at first.

    Args:
        layers: Indices of the linear-attention layers in the model.
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

    def layer(self, layer: int) -> LayerStates:
        """Return a layer's states. Raises ValueError if it is not one of `layers`."""
        index = self.layers.index(layer)
        return LayerStates(self.conv_SLWE[:, index], self.recurrent_SLHKD[:, index])

    def with_slots(self, slots: int) -> "StateCache":
        """Return a cache of `slots` slots. Slot 0 is a copy of this one's."""
        shapes = tuple(self.conv_SLWE.shape[2:]), tuple(self.recurrent_SLHKD.shape[2:])
        other = StateCache(self.layers, *shapes, slots, self.conv_SLWE.dtype, self.conv_SLWE.device)
        other.take([0], self, 0)
        return other

    def clear(self, slot: int) -> None:
        """Set a state to that before the first token."""
        self.conv_SLWE[slot].zero_()
        self.recurrent_SLHKD[slot].zero_()

    def take(self, slots: Sequence[int], other: "StateCache", slot: int) -> None:
        """Copy a state of this or another cache into each of `slots`. On a GPU the copies are only launched.
        Raises ValueError if the other cache has other layers."""
        if other.layers != self.layers:
            raise ValueError(f"a state of layers {other.layers} does not fit layers {self.layers}")
        for target in slots:
            self.conv_SLWE[target].copy_(other.conv_SLWE[slot])
            self.recurrent_SLHKD[target].copy_(other.recurrent_SLHKD[slot])

    def to_host(self, slot: int) -> State:
        """Copy a state into host memory. On a GPU the copies are only launched."""
        return (
            self.conv_SLWE[slot].to("cpu", non_blocking=True, copy=True),
            self.recurrent_SLHKD[slot].to("cpu", non_blocking=True, copy=True),
        )

    @torch.inference_mode()
    def write(self, slots: Sequence[int], layers: Sequence[int], conv: Any, recurrent: Any) -> None:
        """Write the state of some layers, as host arrays from `packed`, into each of `slots`. On a GPU call
        it in `PagedKVCache.moving`.

        Raises:
            ValueError: Layers, shapes or dtypes differ from this cache's.
        """
        rows = [self.layers.index(layer) for layer in layers]
        for states_SL, array in ((self.conv_SLWE, conv), (self.recurrent_SLHKD, recurrent)):
            state_L = as_tensor(array, (len(rows), *states_SL.shape[2:]), states_SL.dtype)
            for row, state in zip(rows, state_L, strict=True):
                for slot in slots:
                    states_SL[slot, row].copy_(state)


def packed(state: State | None) -> dict[str, Any]:
    """Return a state's arrays for `HandedState`, which Ray sends without a copy. None: nothing to send."""
    return {} if state is None else dict(zip(("conv", "recurrent"), map(as_numpy, state), strict=True))
