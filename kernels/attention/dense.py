"""Dense attention: exact and causal, over every key or a sliding window. Shape suffixes: R query rows."""

import torch

from deltafront.kernels.attention.inputs import QueryRows, causal_tiles, new_output, sdpa
from deltafront.kernels.attention.launch import launch
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask, runs_on_cpu

ROWS = 512
"""Query rows that the CPU computes at once, over the keys up to the last of them."""


class DenseBackend:
    """Exact causal attention. A chunk may start at any position; masks are ignored.

    window: Sliding window in keys, including the row's own key. 0: no window.
    """

    def __init__(self, options: object = None, window: int = 0) -> None:
        self._window = window

    def new_state(self, spec: StateSpec) -> None:
        return None

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        with phase("attention"):
            attend = cpu_attend if runs_on_cpu(x.q_BHTD, "dense") else kernel_attend
            return attend(x, self._window)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        return torch.full((), causal_tiles(x, self._window), dtype=torch.float64, device=x.q_BHTD.device)


def cpu_attend(x: AttentionInput, window: int = 0) -> torch.Tensor:
    """Compute causal softmax(q k^T * scale) v, over the last `window` keys if not 0, in q's dtype."""
    position_R = torch.arange(x.q_start, x.q_start + x.q_BHTD.shape[2], device=x.q_BHTD.device)
    return cpu_attend_rows(x, position_R, window)


def cpu_attend_rows(x: AttentionInput, position_R: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Compute `cpu_attend` for the rows at ascending absolute positions position_R. Return out_BHRD."""
    parts = []
    for position in torch.split(position_R, ROWS):
        end = int(position[-1]) + 1
        begin = max(0, int(position[0]) + 1 - window) if window else 0
        key_S = torch.arange(begin, end, device=position.device)
        seen = key_S <= position[:, None]
        if window:
            seen &= key_S > position[:, None] - window
        part = sdpa(
            x.q_BHTD[:, :, position - x.q_start].float(),
            x.k_BGSD[:, :, begin:end].float(),
            x.v_BGSD[:, :, begin:end].float(),
            seen,
            x.scale,
            x.sink_H,
        )
        parts.append(part.to(x.q_BHTD.dtype))
    return torch.cat(parts, dim=2)


def kernel_attend(x: AttentionInput, window: int = 0) -> torch.Tensor:
    """Compute `cpu_attend` on the GPU. Scores are float32; softmax weights are rounded to q's dtype."""
    out_BHTD = new_output(x)
    launch(x, QueryRows(x.q_BHTD, out_BHTD, x.q_start), window=window)
    return out_BHTD
