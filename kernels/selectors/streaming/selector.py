"""StreamingLLM as a selector."""

from __future__ import annotations

from collections.abc import Mapping

from ...interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ...methods import Value
from . import reference


class StreamingSelector:
    """Sink and window (StreamingLLM, Xiao et al. 2023, section 3.2); looks at neither q nor k.

    values: `sink` and `window`, in tokens; tiles are kept whole, so a query may see up to 127 keys more.
    """

    sampled = 0.0

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.sink, self.window = int(values["sink"]), int(values["window"])
        if self.sink < 1 or self.window < 1:
            raise KernelInputError(f"sink {self.sink} and window {self.window} must be at least 1")

    def new_state(self, spec: StateSpec) -> None:
        return None

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        x.require_aligned("streaming")
        with phase("selection"):
            if x.q_BHTD.is_cuda:
                from .kernel import select

                return select(x, self.sink, self.window)
            return reference.select(x, self.sink, self.window)
