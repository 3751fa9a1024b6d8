"""Selectors that score tiles by groups of rows: XAttention, strided rows, block means.

Start at `antidiagonal.py`, or at `selector.py` for the other two.
"""
