"""The parts of a door that every request uses."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import DoorConfig
from ..fleet.fleet import Fleet
from ..metrics import Metrics
from ..tracing import Tracing
from .callers import Callers
from .text.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Made once by each door.

    Args:
        vocabulary: token ids below it have an embedding.
        positions: the longest prompt with its answer, in tokens.
    """

    door: str
    model: str
    fleet: Fleet
    callers: Callers
    tokenizer: TextTokenizer
    metrics: Metrics
    settings: DoorConfig
    vocabulary: int
    positions: int
    eos_ids: tuple[int, ...]
    tracing: Tracing
