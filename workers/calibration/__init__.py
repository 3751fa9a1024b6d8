"""Calibrates a model once, on texts with hidden facts (`probes`), and writes its profile.

For prefill, `method_levels` makes thresholds for each head. For decode, run `delta_layers`, then
`delta_layer_search`. `tiles` shows the tiles that a method computes.
"""
