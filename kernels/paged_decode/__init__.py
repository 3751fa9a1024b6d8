"""Paged decode attention, and page scores and page selection for DELTA's sparse decode.

Start at `dispatch.py` and `page_selection.py`, which pick the CPU version or the Triton kernels. `pages.py`
has the inputs and the suffixes.
"""
