"""Attention backends: dense, over a mask's tiles, or over packed keys (runs of similar keys, each merged into
one weighted key).

Start at `dense.py` or `block_sparse.py`. `launch.py` picks the plain Triton kernel (`flash.py`) or the Hopper
kernel (`hopper/`).
"""
