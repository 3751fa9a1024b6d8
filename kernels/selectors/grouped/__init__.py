"""Tiles scored by groups of rows: XAttention, strided rows, block means.

Start at `antidiagonal.py`, `naive.py` or `block_pool.py`. On a GPU `packing.py` lays groups side by side and
`kernel.py` multiplies them; `cpu.py` is the same on a CPU.
"""
