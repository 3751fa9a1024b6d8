"""Records which attention tiles a method computes for a prompt, by layer and head.

The Δ correction's dense rows and Delta-KV's packed keys (runs of similar keys merged into one weighted key)
are not recorded.

Shape suffixes also: N query blocks, M key blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from deltafront.kernels.attention.inputs import window_begin
from deltafront.kernels.build import Composition, DenseWhenShort, Windowed, build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.correction import Correction
from deltafront.kernels.interface import Attention, AttentionInput, Phase, Selector, StateSpec, TileMask
from deltafront.kernels.methods import MethodSpec
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import load_profile
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.settings import ModelSpec


@dataclass(frozen=True)
class TilesRead:
    """The attention tiles that were computed. read_LHNM is bool; entries above the diagonal are False."""

    read_LHNM: np.ndarray[Any, Any]
    tokens: int

    @property
    def density_LH(self) -> np.ndarray[Any, Any]:
        """The computed share of the causal tiles, by layer and head, float64."""
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
    """Prefill a prompt in chunks, as a pipeline stage does, and record the computed tiles.

    Args:
        chunk_tokens: Tokens of a chunk, a multiple of 128.
        progress: Called with the number of tokens prefilled so far.

    Raises:
        ModelError: The model cannot be loaded.
        ValueError: The prompt is empty or too long for the model.
        MethodError: The method is unknown, or the profile lacks the density.
    """
    stack, tokens = load_model(model, device), len(token_ids)
    if not 0 < tokens <= stack.config.positions:
        positions = stack.config.positions
        raise ValueError(f"{tokens} tokens: must be between 1 and the model's {positions} positions")
    config, blocks, layers = stack.config, -(-tokens // BLOCK), len(stack.layers)
    method = build(spec, thresholds_for(load_profile(model), spec), config.windows)
    recorder = _recording(method)
    where: Any = {"device": stack.device, "dtype": stack.dtype}
    state = StateSpec(1, config.q_heads, config.kv_heads, config.head_dim, tokens, **where)
    states = [method.new_state(replace(state, layer=layer)) for layer in stack.layers]
    k_LBGSD = torch.empty(layers, 1, config.kv_heads, tokens, config.head_dim, **where)
    v_LBGSD = torch.empty_like(k_LBGSD)
    read_LHNM = torch.ones(layers, config.q_heads, blocks, blocks, dtype=torch.bool).tril()
    for layer, window in config.windows.items():
        for row in range(blocks):
            read_LHNM[layer, :, row, : window_begin(row, window)] = False

    def attend(
        start: int, layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor
    ) -> torch.Tensor:
        end = start + len(q_THD)
        for seen_LBGSD, new_TGD in ((k_LBGSD, k_TGD), (v_LBGSD, v_TGD)):
            seen_LBGSD[layer, 0, :, start:end] = new_TGD.transpose(0, 1)
        seen = k_LBGSD[layer, :, :, :end], v_LBGSD[layer, :, :, :end]
        q_BHTD, sink_H = q_THD.transpose(0, 1)[None], stack.sinks(layer)
        x = AttentionInput.of(q_BHTD, *seen, q_start=start, prompt_tokens=tokens, sink_H=sink_H)
        out_BHTD, _coverage = method.attend(x, states[layer])
        if recorder is not None and recorder.mask is not None:  # else all causal tiles were computed
            rows = slice(x.first_block, x.first_block + x.query_blocks)
            read_LHNM[layer, :, rows] = _listed(recorder.mask, blocks)
            recorder.mask = None
        return out_BHTD[0].transpose(0, 1)

    for start in range(0, tokens, chunk_tokens):
        ids_T = torch.tensor(token_ids[start : start + chunk_tokens], dtype=torch.int64)
        positions_T = torch.arange(start, start + len(ids_T), device=stack.device)
        stack.forward(stack.embed(ids_T), positions_T, partial(attend, start))
        progress(start + len(ids_T))
    return TilesRead(read_LHNM.numpy(), tokens)


def _listed(mask: TileMask, blocks: int) -> torch.Tensor:
    """Convert a mask from lists of key blocks to bool_HNM. Entries beyond a list's count become block 0,
    which every list contains."""
    index_HNM, count_HN = mask.index_BHNM[0].long().cpu(), mask.count_BHN[0].cpu()
    listed_HNM = torch.arange(index_HNM.shape[-1]) < count_HN[..., None]
    read_HNM = torch.zeros(*count_HN.shape, blocks, dtype=torch.bool)
    return read_HNM.scatter_(2, index_HNM.where(listed_HNM, 0), True)


class _Recorder:
    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self.scored_share = selector.scored_share
        self.mask: TileMask | None = None

    def new_state(self, spec: StateSpec) -> Any:
        return self._selector.new_state(spec)

    def select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        self.mask = self._selector.select(x, state, phase)
        self.scored_share = self._selector.scored_share
        return self.mask


def _recording(method: Attention) -> _Recorder | None:
    while not isinstance(method, Composition):
        assert isinstance(method, Correction | DenseWhenShort | Windowed)
        method = method.inner if isinstance(method, Correction) else method.method
    if method.selector is None:
        return None
    recorder = _Recorder(method.selector)
    method.selector = recorder
    return recorder
