"""Attention over packed keys. Each run of similar keys becomes one packed key: the run's mean or its first
key, the anchor.

Start at the backends, `delta_kv.py` and `delta_xattention.py`. `runs.py` explains the suffixes.
"""
