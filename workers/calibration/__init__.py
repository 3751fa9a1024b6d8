"""Measures a model once, on texts with facts hidden in them (`probes.py`), for its profile.

Prefill: `method_levels.py` makes thresholds for each head. Decode: `delta_layers.py`, then
`delta_layer_search.py`. `tiles.py` shows what a method reads.
"""
