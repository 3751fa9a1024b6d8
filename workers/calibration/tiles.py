"""Shows which tiles of attention a method chooses for a prompt, by layer and head. Dense rows of the Δ
correction and Delta-KV's packed rest do not show.

Shape suffixes also: N query blocks, M key blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...kernels.build import Composition, DenseWhenShort, build
from ...kernels.constants import BLOCK
from ...kernels.correction import Correction
from ...kernels.interface import Attention, AttentionInput, Phase, Selector, StateSpec, Thresholds, TileMask
from ...kernels.methods import MethodSpec
from ..model.calibrated.levels import thresholds_for
from ..model.calibrated.profile import load_profile
from ..model.decoder.load import load_model
from ..model.decoder.stack import LayerStack
from ..settings import ModelSpec


@dataclass(frozen=True)
class TilesRead:
    """read_LHNM: bool, nothing above the diagonal."""

    read_LHNM: np.ndarray[Any, Any]
    tokens: int

    @property
    def density_LH(self) -> np.ndarray[Any, Any]:
        """Tiles read over causal tiles, float64."""
        blocks = self.read_LHNM.shape[-1]
        density_LH: np.ndarray[Any, Any] = self.read_LHNM.sum((-1, -2)) / (blocks * (blocks + 1) / 2)
        return density_LH


@torch.inference_mode()
def tiles_read(
    model: ModelSpec,
    token_ids: Sequence[int],
    spec: MethodSpec,
    chunk_tokens: int,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda _tokens: None,
) -> TilesRead:
    """Read a prompt in chunks, as a prefill stage does.

    Args:
        chunk_tokens: A multiple of 128.
        progress: It hears the tokens read so far.

    Raises:
        ModelError: The model cannot be loaded.
        ValueError: The prompt is empty or too long for the model.
        MethodError: The method is unknown, or the profile lacks the density.
    """
    stack, tokens = load_model(model, device), len(token_ids)
    if not 0 < tokens <= stack.config.positions:
        positions = stack.config.positions
        raise ValueError(f"{tokens} tokens: must be between 1 and the model's {positions} positions")
    reading = _Reading(stack, tokens, spec, thresholds_for(load_profile(model), spec))
    for start in range(0, tokens, chunk_tokens):
        ids_T = torch.tensor(token_ids[start : start + chunk_tokens], dtype=torch.int64)
        reading.read(ids_T, start)
        progress(start + len(ids_T))
    return TilesRead(reading.read_LHNM.numpy(), tokens)


class _Recorder:
    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self.sampled = selector.sampled
        self.mask: TileMask | None = None

    def new_state(self, spec: StateSpec) -> Any:
        return self._selector.new_state(spec)

    def select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        self.mask = self._selector.select(x, state, phase)
        self.sampled = self._selector.sampled
        return self.mask


class _Reading:
    def __init__(
        self, stack: LayerStack, tokens: int, spec: MethodSpec, thresholds: Thresholds | None
    ) -> None:
        config = stack.config
        blocks = -(-tokens // BLOCK)
        self._stack, self._tokens = stack, tokens
        self._method = build(spec, thresholds)
        self._recorder = _recording(self._method)
        state = StateSpec(
            1,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            tokens,
            device=stack.device,
            dtype=stack.dtype,
        )
        self._states = [self._method.new_state(replace(state, layer=layer)) for layer in stack.layers]
        shape = len(stack.layers), 1, config.kv_heads, tokens, config.head_dim
        self._k_LBGSD = torch.empty(shape, dtype=stack.dtype, device=stack.device)
        self._v_LBGSD = torch.empty_like(self._k_LBGSD)
        self.read_LHNM = torch.zeros(len(stack.layers), config.q_heads, blocks, blocks, dtype=torch.bool)

    def read(self, ids_T: torch.Tensor, start: int) -> None:
        end = start + len(ids_T)

        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            for seen_LBGSD, new_TGD in ((self._k_LBGSD, k_TGD), (self._v_LBGSD, v_TGD)):
                seen_LBGSD[layer, 0, :, start:end] = new_TGD.transpose(0, 1)
            x = AttentionInput.of(
                q_THD.transpose(0, 1)[None],
                self._k_LBGSD[layer, :, :, :end],
                self._v_LBGSD[layer, :, :, :end],
                q_start=start,
                prompt_tokens=self._tokens,
            )
            out_BHTD, _coverage = self._method.attend(x, self._states[layer])
            self._record(layer, x)
            return out_BHTD[0].transpose(0, 1)

        positions_T = torch.arange(start, end, device=self._stack.device)
        self._stack.forward(self._stack.embed(ids_T), positions_T, attend)

    def _record(self, layer: int, x: AttentionInput) -> None:
        """If nothing selects, all causal tiles are read."""
        mask, rows = None, slice(x.first_block, x.first_block + x.query_blocks)
        if self._recorder is not None:
            mask, self._recorder.mask = self._recorder.mask, None
        blocks = self.read_LHNM.shape[-1]
        if mask is None:
            self.read_LHNM[layer, :, rows] = torch.ones(blocks, blocks, dtype=torch.bool).tril()[rows]
            return
        index_HNM, count_HN = mask.index_BHNM[0].long().cpu(), mask.count_BHN[0].cpu()
        listed_HNM = torch.arange(index_HNM.shape[-1]) < count_HN[..., None]
        # The rest of a list is undefined: it becomes block 0, which is in every list.
        read_HNM = torch.zeros(*count_HN.shape, blocks, dtype=torch.bool)
        self.read_LHNM[layer, :, rows] = read_HNM.scatter_(2, index_HNM.where(listed_HNM, 0), True)


def _recording(method: Attention) -> _Recorder | None:
    while not isinstance(method, Composition):
        assert isinstance(method, Correction | DenseWhenShort)
        method = method.inner if isinstance(method, Correction) else method.method
    if method.selector is None:
        return None
    recorder = _Recorder(method.selector)
    method.selector = recorder
    return recorder
