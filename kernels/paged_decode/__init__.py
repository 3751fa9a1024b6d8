"""Decode attention over pages, page scores and page selection (DELTA).

Start at `dispatch.py` and `page_selection.py`, which pick a CPU form (`cpu.py`) or the Triton kernels
(`launch.py`, `kernel.py`, `assign.py`; `selection_kernel.py`). `pages.py` has the inputs.
"""
