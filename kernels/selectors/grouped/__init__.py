"""Tiles scored by groups of rows: XAttention, strided rows, block means.

Start at `antidiagonal.py`, `naive.py` or `block_pool.py`.
"""
