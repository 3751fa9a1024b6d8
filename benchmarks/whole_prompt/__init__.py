"""Baselines that read a whole prompt at once, so the service cannot serve them: MInference and FlexPrefill.

Start at `methods.py`: it registers `vertical_slash` and `flex`. `line_selector.py` is what both share.
"""
