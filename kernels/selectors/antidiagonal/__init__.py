"""Antidiagonal sums in stride x stride cells (XAttention)."""
