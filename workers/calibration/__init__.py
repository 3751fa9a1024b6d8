"""Measures a model once, on texts with facts hidden in them (`probes`), for its profile.

For prefill, `method_levels` makes thresholds for each head. For decode, run `delta_layers`, then
`delta_layer_search`. `tiles` shows the tiles that a method computes.
"""
