"""The steps of the Δ correction in fp32, on the CPU. R dense rows; other suffixes as in `interface.py`."""

from __future__ import annotations

import torch

from ..executors.dense import reference as dense
from ..interface import AttentionInput


def dense_rows(x: AttentionInput, first: int, gamma: int, tail: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention of the chunk's rows first, first + gamma, … below `tail`, and of all from `tail` on.

    Both in q's dtype; either may have no rows.
    """
    stop = x.q_start + x.q_BHTD.shape[2]
    every = torch.arange(x.q_start + first, max(x.q_start + tail, x.q_start + first), gamma)
    strided, last = (
        dense.attend_rows(x, position_R) if position_R.numel() else x.q_BHTD[:, :, :0]
        for position_R in (every, torch.arange(x.q_start + tail, stop))
    )
    return strided, last


def add_delta(
    out_BHTD: torch.Tensor, dense_BHRD: torch.Tensor, carried_BHD: torch.Tensor, first: int, gamma: int
) -> torch.Tensor:
    """Add each dense row's difference to its own row and the gamma - 1 after it, in place.

    Rows before `first` take the difference carried from the chunk before. Returns what the next one carries.
    """
    sparse_BHRD = out_BHTD[:, :, first::gamma].float()
    delta_BHRD = torch.cat([carried_BHD[:, :, None], dense_BHRD.float() - sparse_BHRD], dim=2)
    row_T = torch.arange(out_BHTD.shape[2])
    owner_T = torch.div(row_T - first, gamma, rounding_mode="floor") + 1
    out_BHTD.copy_((out_BHTD.float() + delta_BHRD[:, :, owner_T]).to(out_BHTD.dtype))
    return delta_BHRD[:, :, -1].clone()
