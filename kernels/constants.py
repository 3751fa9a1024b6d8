"""Constants of the whole package. Importing them loads no torch."""

BLOCK = 128
"""Rows and columns of a tile, in tokens. Tiles are aligned to absolute positions."""

PAGE_TOKENS = 16
"""Tokens of a page, the unit in which KV cache is allocated, transferred and selected."""

PREFILL_HEAD_DIMS, DECODE_HEAD_DIMS = (16, 32, 64, 128, 256), (64, 128, 256)
"""Head dimensions that the attention kernels of prefill and of decode take."""

LOG2E = 1.4426950408889634
"""exp(x) is exp2(x * LOG2E)."""
