"""Attention over packed keys: each run of similar keys becomes one row, its mean or its anchor's own.

`runs.py` finds and remembers runs, `pack.py` packs them on the GPU. `delta_kv.py` and `delta_xattention.py`
(kernels in `delta_xattention_kernel.py`) are the executors.
"""
