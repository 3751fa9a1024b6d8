"""Questions about a CUDA device, asked once."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
