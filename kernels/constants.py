"""The numbers that every layer shares. Free of torch, so that the front door may read them."""

from __future__ import annotations

BLOCK = 128
"""Rows and columns of an attention tile, in tokens. Tiles are aligned to absolute positions."""

PAGE_TOKENS = 16
"""Tokens of one page, the unit in which K/V is allocated, moved and selected."""

PREFILL_HEAD_DIMS, DECODE_HEAD_DIMS = (16, 32, 64, 128), (64, 128, 256)
"""Head dimensions that a GPU's attention kernels take: those of chunks, and those of pages."""

LOG2E = 1.4426950408889634
"""log2 of e: exp(x) is exp2(x * LOG2E)."""
