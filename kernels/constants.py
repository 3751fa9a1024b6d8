"""The numbers that every layer shares. Free of torch, so that the front door may read them."""

from __future__ import annotations

BLOCK = 128
"""Rows and columns of an attention tile, in tokens. Tiles are aligned to absolute positions."""

PAGE_TOKENS = 16
"""Tokens of one page, the unit in which K/V is allocated, moved and selected."""

GPU_HEAD_DIMS = (64, 128)
"""Head dimensions that a GPU's kernels of prefill and of decode both take."""

LOG2E = 1.4426950408889634
"""log2 of e: exp(x) is exp2(x * LOG2E)."""
