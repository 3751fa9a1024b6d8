"""Decode attention over pages, page scores and page selection (DELTA).

Start at `dispatch.py` and `page_selection.py`, which pick a CPU form or the Triton kernels. `pages.py` has
the inputs and the suffixes.
"""
