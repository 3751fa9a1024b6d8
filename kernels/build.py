"""Turns a `MethodSpec` into something that runs: selector × executor × wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .executors.common import causal_tiles
from .interface import Attention, AttentionInput, Coverage, Executor, Phase, Selector, StateSpec, no_phase
from .methods import MethodSpec, Value

SELECTORS = {
    "streaming": ("streaming", "StreamingSelector"),
    "antidiagonal": ("antidiagonal", "AntidiagonalSelector"),
    "anchors": ("anchors", "AnchorsSelector"),
    "naive": ("naive", "NaiveSelector"),
    "block_pool": ("block_pool", "BlockPoolSelector"),
    "vertical_slash": ("vertical_slash", "VerticalSlashSelector"),
    "flex": ("flex", "FlexSelector"),
}
"""Folder under `selectors/`, whose `selector.py` holds the class."""

EXECUTORS = {
    "dense": ("dense", "DenseExecutor"),
    "block_sparse": ("block_sparse", "BlockSparseExecutor"),
    "packed_kv": ("packed_kv", "PackedKVExecutor"),
    "block_sparse_packed": ("block_sparse_packed", "BlockSparsePackedExecutor"),
}
"""Folder under `executors/`, whose `executor.py` holds the class."""


def build(spec: MethodSpec) -> Attention:
    """The method that `spec` names, ready to attend. One instance serves every layer and prompt."""
    executor: Executor = _load("executors", "executor", EXECUTORS[spec.executor], spec.values)
    selector: Selector | None = None
    if spec.selector is not None:
        selector = _load("selectors", "selector", SELECTORS[spec.selector], spec.values)
    method: Attention = Composition(selector, executor)
    if spec.correction:
        from .delta_correction.wrapper import DeltaCorrection

        method = DeltaCorrection(method, int(spec.values["gamma"]))
    shortest = int(spec.values.get("min_tokens", 0))
    if shortest > 0:
        dense: Executor = _load("executors", "executor", EXECUTORS["dense"], {})
        method = DenseWhenShort(method, Composition(None, dense), shortest)
    return method


def _load(package: str, module: str, place: tuple[str, str], values: dict[str, Value]) -> Any:
    folder, name = place
    found = import_module(f".{package}.{folder}.{module}", __package__)
    return getattr(found, name)(values)


@dataclass
class CompositionState:
    """What the selector and the executor carry from chunk to chunk of one layer."""

    selector: Any
    executor: Any


class Composition:
    """A selector (or none: everything causal) and an executor, as one method."""

    def __init__(self, selector: Selector | None, executor: Executor) -> None:
        self.selector = selector
        self.executor = executor

    def new_state(self, spec: StateSpec) -> CompositionState:
        chosen = None if self.selector is None else self.selector.new_state(spec)
        return CompositionState(chosen, self.executor.new_state(spec))

    def attend(
        self, x: AttentionInput, state: CompositionState, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, Coverage]:
        mask, sampled = None, 0.0
        if self.selector is not None:
            mask = self.selector.select(x, state.selector, phase)
            sampled = self.selector.sampled
        out_BHTD = self.executor.attend(x, mask, state.executor, phase)
        computed = self.executor.computed_tiles(x, mask, state.executor)
        return out_BHTD, Coverage(computed, causal_tiles(x), sampled)


class DenseWhenShort:
    """Prompts of at most `shortest` tokens take the dense method: there the others save nothing.

    The prompt's whole length decides, so every chunk of a prompt takes the same path.
    """

    def __init__(self, method: Attention, dense: Composition, shortest: int) -> None:
        self.method = method
        self.dense = dense
        self.shortest = shortest

    def new_state(self, spec: StateSpec) -> Any:
        return self.method.new_state(spec)

    def attend(self, x: AttentionInput, state: Any, phase: Phase = no_phase) -> tuple[torch.Tensor, Coverage]:
        if x.prompt_tokens <= self.shortest:
            return self.dense.attend(x, CompositionState(None, None), phase)
        return self.method.attend(x, state, phase)
