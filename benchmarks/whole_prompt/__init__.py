"""MInference and FlexPrefill, baselines that cannot prefill in chunks, so the service refuses them.

Start at `methods.py`: it registers `vertical_slash` and `flex`. `line_selector.py` has their base class.
"""
