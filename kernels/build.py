"""Builds the attention method of a `MethodSpec` from its selector, attention backend and correction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from deltafront.kernels.attention.dense import DenseBackend
from deltafront.kernels.attention.inputs import causal_tiles
from deltafront.kernels.correction import Correction, CorrectionState
from deltafront.kernels.interface import (
    Attention,
    AttentionBackend,
    AttentionInput,
    KernelInputError,
    Phase,
    Selector,
    StateSpec,
    Thresholds,
    TileCounts,
    no_phase,
)
from deltafront.kernels.methods import MethodError, MethodSpec, registered
from deltafront.kernels.options import ScoredOptions
from deltafront.kernels.selectors.scored import ScoredSelector


def build(
    spec: MethodSpec, thresholds: Thresholds | None = None, windows: Mapping[int, int] | None = None
) -> Attention:
    """Make the method that `spec` names. One instance serves all layers and prompts.

    Args:
        thresholds: Selection thresholds by layer and query head. The option `density` needs them.
        windows: Sliding window in keys by layer index. These layers use exact attention.

    Raises:
        MethodError: The method is not registered.
        KernelInputError: The method takes no thresholds, or needs them and got none.
    """
    preset, values, options = registered(spec), spec.values, options_for(spec)
    selector = None if preset.selector is None else part_of(preset.selector)(options)
    if thresholds is not None:
        if not isinstance(selector, ScoredSelector):
            raise KernelInputError(f"{spec.name} ranks no tiles by a score, so it takes no thresholds")
        selector.thresholds = thresholds
    elif isinstance(options, ScoredOptions) and options.density > 0:
        raise KernelInputError(
            f"{spec.name}: density = {options.density} needs thresholds for each layer and head, but has none"
        )
    method: Attention = Composition(selector, part_of(preset.backend)(options))
    if spec.correction:
        method = Correction(method, int(values["gamma"]), spread=float(values["spread"]))
    shortest = int(values.get("min_tokens", 0))
    if shortest > 0:
        method = DenseWhenShort(method, Composition(None, DenseBackend()), shortest)
    return Windowed(method, windows) if windows else method


def options_for(spec: MethodSpec) -> Any:
    preset, values = registered(spec), spec.values
    return preset.form(**{name: values[name] for name in preset.options})


def part_of(registered: Callable[[Any], Any] | str) -> Callable[[Any], Any]:
    """Return the callable that makes a method's selector or backend. If it was registered as a path, import
    it. Raises MethodError."""
    if not isinstance(registered, str):
        return registered
    module, _, name = registered.partition(":")
    try:
        made: Callable[[Any], Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MethodError("method", f"{registered} cannot be imported: {error}") from error
    return made


@dataclass
class CompositionState:
    selector: Any
    backend: Any


class Composition:
    """A selector with an attention backend. Without a selector the backend chooses the keys."""

    def __init__(self, selector: Selector | None, backend: AttentionBackend) -> None:
        self.selector = selector
        self.backend = backend

    def new_state(self, spec: StateSpec) -> CompositionState:
        chosen = None if self.selector is None else self.selector.new_state(spec)
        return CompositionState(chosen, self.backend.new_state(spec))

    def attend(
        self, x: AttentionInput, state: CompositionState, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]:
        mask, scored_share = None, 0.0
        if self.selector is not None:
            mask = self.selector.select(x, state.selector, phase)
            scored_share = self.selector.scored_share
        out_BHTD = self.backend.attend(x, mask, state.backend, phase)
        computed = self.backend.computed_tiles(x, mask, state.backend)
        return out_BHTD, TileCounts(computed, causal_tiles(x), scored_share)


def runs_a_block(state: Any) -> float | None:
    """Return the mean number of runs of similar keys in a block, from the state of one layer and prompt; None
    if its method looks for no runs, or has found none yet."""
    if isinstance(state, tuple):  # Windowed
        return runs_a_block(state[1])
    if isinstance(state, CorrectionState):
        return runs_a_block(state.inner)
    parts = [part for part in (state.selector, state.backend) if hasattr(part, "runs_a_block")]
    return parts[0].runs_a_block() if parts else None


class DenseWhenShort:
    """Uses dense attention for prompts of at most `shortest` tokens and `method` for longer ones."""

    def __init__(self, method: Attention, dense: Composition, shortest: int) -> None:
        self.method = method
        self.dense = dense
        self.shortest = shortest

    def new_state(self, spec: StateSpec) -> Any:
        return self.method.new_state(spec)

    def attend(
        self, x: AttentionInput, state: Any, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]:
        if x.prompt_tokens <= self.shortest:
            return self.dense.attend(x, CompositionState(None, None), phase)
        return self.method.attend(x, state, phase)


class Windowed:
    """Uses exact sliding-window attention in layers with a window, and `method` in layers without one."""

    def __init__(self, method: Attention, windows: Mapping[int, int]) -> None:
        self.method = method
        sizes = set(windows.values())
        made = {size: Composition(None, DenseBackend(window=size)) for size in sizes}
        self._layers = {layer: made[size] for layer, size in windows.items()}

    def new_state(self, spec: StateSpec) -> tuple[Attention, Any]:
        method = self._layers.get(spec.layer, self.method)
        return method, method.new_state(spec)

    def attend(
        self, x: AttentionInput, state: tuple[Attention, Any], phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]:
        method, own = state
        return method.attend(x, own, phase)
