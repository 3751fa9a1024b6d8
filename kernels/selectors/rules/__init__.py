"""Selection rules: which tiles a row keeps, given their scores.

Start at `rule.py`, the definition. `cpu.py` and `kernel.py` apply it; `sums.py` is the form in which GPU
kernels hand scores over.
"""
