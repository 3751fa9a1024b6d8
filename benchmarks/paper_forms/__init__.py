"""Forms of the papers that the service does not have: ablations, controls, baselines. In torch, so not timed.

Start at `methods.py`: it registers them. `oracle.py` has their definitions, row by row.
"""
