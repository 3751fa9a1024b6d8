"""Measures a model once, on texts with facts hidden in them (`probes`), for its profile.

Prefill: `method_levels` makes thresholds for each head. Decode: `delta_layers`, then `delta_layer_search`.
`tiles` shows what a method reads.
"""
