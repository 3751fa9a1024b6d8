"""Attention over packed keys: each run of similar keys becomes one row, its mean or its anchor's own.

Start at the backends, `delta_kv.py` and `delta_xattention.py`. `runs.py` has the suffixes.
"""
