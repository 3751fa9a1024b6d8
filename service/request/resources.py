"""The parts of a door that every request needs."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import DoorConfig
from ..fleet.view import Fleet
from ..metrics import Metrics
from ..tracing import Tracing
from .callers import Callers
from .text.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Made once by each door.

    Args:
        door: this door's name among doors.
        model: tells the model from every other.
        vocabulary: token ids below it have an embedding.
        positions: the longest sequence of prompt and answer, in tokens.
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
