"""Random prompts, short answers and a clock, for tests of a decode worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deltafront.workers.messages.requests import Sampling

SHORT = Sampling(max_tokens=8, ignore_eos=True)


def ids_of(length: int) -> list[int]:
    return [(7 * i + length) % 198 for i in range(length)]


def packed(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


class Clock:
    """A clock that advances when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def during(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        """Run `work`, which takes these seconds."""

        def slow(*args: Any) -> Any:
            self.now += seconds
            return work(*args)

        return slow
