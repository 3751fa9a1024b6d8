"""The states of samples' linear attention, and marks to which they return."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltafront.kernels.gated_delta.states import RowStates, SequenceStates, StepStates
from deltafront.workers.kv.states import LinearStates
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.model_files import ModelError

Rows = Callable[[int], RowStates] | None
"""`row_states` of `LayerStack.forward`."""


class SampleStates:
    """A state of each of `places` samples, or none if the model has no linear attention.

    A sample's rows change its state. `mark` keeps a copy of it, and `rewind` brings the copy back.
    """

    MARKS = "read", "agreed"
    """The end of the document or prompt, and of the answer's first tokens that agree with a given answer."""

    def __init__(self, stack: LayerStack, places: int) -> None:
        config, self._places = stack.config, places
        self._cache: LinearStates | None = None
        if (linear := config.linear) is not None:
            shapes = linear.conv_shape, linear.recurrent_shape
            slots = places * (1 + len(self.MARKS))
            self._cache = LinearStates(linear.layers, *shapes, slots, stack.dtype, stack.device)
        self._tokens = [0] * places * (1 + len(self.MARKS))
        """Tokens that the state in a slot has seen."""

    def clear(self, place: int) -> None:
        self._tokens[place] = 0
        if self._cache is not None:
            self._cache.clear(place)

    def mark(self, place: int, mark: str) -> None:
        self._copy(place, self._slot(place, mark))

    def rewind(self, place: int, mark: str) -> None:
        self._copy(self._slot(place, mark), place)

    def rows(self, place: int, start: int, count: int) -> Rows:
        """Return the state for `count` rows of a sample, after its first `start` tokens.

        Raises:
            ModelError: The state has seen other tokens than these, and cannot go back.
        """
        if (cache := self._cache) is None:
            return None
        if self._tokens[place] != start:
            raise ModelError(
                f"linear attention cannot continue after {start} tokens: its state has seen "
                f"{self._tokens[place]}"
            )
        self._tokens[place] = start + count
        return lambda layer: SequenceStates(cache.layer(layer), place, ((count, place),))

    def step(self, samples: int) -> Rows:
        """Return the states for a row of each of the first `samples` samples."""
        if (cache := self._cache) is None:
            return None
        for place in range(samples):
            self._tokens[place] += 1
        slots_R = torch.arange(samples, device=cache.conv_SLWE.device)
        return lambda layer: StepStates(cache.layer(layer), slots_R)

    def _slot(self, place: int, mark: str) -> int:
        return (1 + self.MARKS.index(mark)) * self._places + place

    def _copy(self, slot: int, target: int) -> None:
        self._tokens[target] = self._tokens[slot]
        if self._cache is not None:
            self._cache.take([target], self._cache, slot)
