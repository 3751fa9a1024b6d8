"""Methods from the papers that the service does not have: ablations, controls and baselines. They are written
in torch, so they are not timed.

Start at `methods.py`, which registers the methods. `oracle.py` defines them row by row. `thesis` in a name
stands for the paper DeltaAttention.
"""
