"""Which K/V of one prompt has been announced and which has been written: pure accounting.

A token counts once per layer. Ranges are half-open token ranges [start, stop) of one layer.
"""

from __future__ import annotations


class ArrivalError(ValueError):
    """An announcement that contradicts the request's plan: its request must fail, not continue."""


class KVArrival:
    """Claims and completions of `tokens` tokens in each of `layers` layers (0 .. layers-1).

    A range is claimed when it is announced and completed when its K/V is in the pages, so a repeated
    announcement is recognised even while the first is still being pulled.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self._layers = layers
        self._tokens = tokens
        self._claimed: tuple[dict[int, int], ...] = tuple({} for _ in range(layers))
        self._written = 0

    @property
    def complete(self) -> bool:
        return self._written == self._layers * self._tokens

    @property
    def missing(self) -> int:
        """Tokens × layers that are not in the pages yet."""
        return self._layers * self._tokens - self._written

    def claim(self, layer: int, start: int, tokens: int) -> bool:
        """True: pull this range. False: exactly this range was announced before.

        Raises ArrivalError for a range outside the prompt or one that overlaps another.
        """
        if not 0 <= layer < self._layers:
            raise ArrivalError(f"K/V announced for layer {layer} of a model with {self._layers} layers")
        stop = start + tokens
        if tokens < 1 or start < 0 or stop > self._tokens:
            raise ArrivalError(
                f"K/V announced for tokens {start} .. {stop - 1} of a prompt of {self._tokens} tokens"
            )
        claimed = self._claimed[layer]
        if claimed.get(start) == stop:
            return False
        for other, end in claimed.items():
            if other < stop and start < end:
                raise ArrivalError(
                    f"K/V of layer {layer}, tokens {start} .. {stop - 1} overlaps {other} .. {end - 1}"
                )
        claimed[start] = stop
        return True

    def written(self, tokens: int) -> None:
        """A claimed range of `tokens` tokens is in the pages."""
        self._written += tokens
