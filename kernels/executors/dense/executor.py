"""The dense executor: the reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import AttentionInput, Phase, StateSpec, TileMask
from ...methods import Value
from ..common import causal_tiles, runs_on_cpu, scalar
from . import reference


class DenseExecutor:
    """Exact causal attention; takes no mask and any q_start."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        del values  # takes no options

    def new_state(self, spec: StateSpec) -> None:
        del spec

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        del mask, state
        with phase("attention"):
            if runs_on_cpu(x, "dense"):
                return reference.attend(x)
            from . import kernel

            return kernel.attend(x)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        del mask, state
        return scalar(causal_tiles(x), x)
