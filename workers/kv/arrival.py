"""Tracks which KV of one prompt has been announced and which has been written, as ranges of tokens per layer.

A range is half-open: tokens [start, stop) of one layer. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence


class ArrivalError(ValueError):
    """Announced KV does not fit the request. The request must fail."""


class KVArrival:
    """Records the ranges of a prompt's KV.

    A range is claimed when it is announced, and written when it is in the pages. A repeated announcement is
    thus recognised even while the first one is still being copied.

    Args:
        layers: The layers that attend.
        held: Number of first tokens whose KV is in the pages from the start, so it counts as written.
    """

    def __init__(self, layers: Sequence[int], tokens: int, held: int = 0) -> None:
        self._layers = layers
        self._tokens = tokens
        self._held = held
        self._claimed: dict[int, dict[int, int]] = {layer: {} for layer in layers}
        self._written: dict[int, dict[int, int]] = {layer: {} for layer in layers}
        self._count = 0
        if held:
            for layer in layers:
                self.claim(layer, 0, held)
                self.written(layer, 0, held)

    @property
    def complete(self) -> bool:
        return self._count == len(self._layers) * self._tokens

    def claim(self, layer: int, start: int, tokens: int) -> bool:
        """Claim an announced range.

        Returns:
            False if the same range was claimed before.
        Raises:
            ArrivalError: The range is outside the prompt or overlaps another range.
        """
        if layer not in self._claimed:
            raise ArrivalError(f"KV announced for layer {layer}, which is not one of {self._layers}")
        stop = start + tokens
        if tokens < 1 or start < 0 or stop > self._tokens:
            raise ArrivalError(
                f"KV announced for tokens {start} .. {stop - 1} of a prompt of {self._tokens} tokens"
            )
        claimed = self._claimed[layer]
        if claimed.get(start) == stop:
            return False
        for other, end in claimed.items():
            if other < stop and start < end:
                raise ArrivalError(
                    f"KV of layer {layer}, tokens {start} .. {stop - 1} overlaps {other} .. {end - 1}"
                )
        claimed[start] = stop
        return True

    def written(self, layer: int, start: int, tokens: int) -> None:
        self._written[layer][start] = start + tokens
        self._count += tokens

    def resume_point(self, points: Iterable[int]) -> int:
        """Return the largest of `points` before which every layer's KV is written; `held` if there is none.

        A point counts only if a written range ends there in every layer.
        """
        ends = [set(_ends(written)) for written in self._written.values()]
        return max(set(points).intersection(*ends), default=self._held)

    def until(self, tokens: int) -> KVArrival:
        """Return a copy with only the held tokens and the written ranges that end at or before `tokens`."""
        rest = KVArrival(self._layers, self._tokens, self._held)
        for layer, written in self._written.items():
            for start, stop in written.items():
                if self._held < stop <= tokens:
                    rest.claim(layer, start, stop - start)
                    rest.written(layer, start, stop - start)
        return rest


def _ends(written: Mapping[int, int]) -> Iterator[int]:
    end = 0
    while end in written:
        end = written[end]
        yield end


class StateArrival:
    """Records which states of one prompt have been written.

    Args:
        layers: The layers with a state. Each stage sends the state of its own.
        places: The numbers of tokens whose states the request needs. Others may come, too.
    """

    def __init__(self, layers: Sequence[int] = (), places: Iterable[int] = ()) -> None:
        self._layers, self._places = frozenset(layers), tuple(places)
        self._written: dict[int, set[int]] = {}

    @property
    def complete(self) -> bool:
        return all(self.has(tokens) for tokens in self._places)

    def has(self, tokens: int) -> bool:
        return self._written.get(tokens, set()) >= self._layers

    def check(self, layers: Sequence[int]) -> None:
        """Raise ArrivalError unless all of `layers` have a state."""
        if strange := set(layers) - self._layers:
            raise ArrivalError(f"a state came for layers {sorted(strange)}, which have none")

    def written(self, tokens: int, layers: Sequence[int]) -> None:
        self._written.setdefault(tokens, set()).update(layers)

    def until(self, tokens: int) -> StateArrival:
        """Return a copy with only the states after at most `tokens` tokens."""
        rest = StateArrival(tuple(self._layers), self._places)
        rest._written = {place: layers for place, layers in self._written.items() if place <= tokens}
        return rest
