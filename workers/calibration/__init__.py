"""Measures a model once, on texts with facts hidden in them, for its profile.

Prefill begins at `method_levels.py`: thresholds of each head, from `curves.py`, `sensitivity.py` and
`allocation.py`. Decode begins at `delta_layers.py`, and `delta_layer_search.py` goes on.
"""
