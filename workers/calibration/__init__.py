"""Calibrates a model once, on texts with hidden facts (`probes`), for the model's profile.

For sparse prefill, `method_levels` finds thresholds for each head. For sparse decode, `delta_layers` and then
`delta_layer_search` find the Δ-layers. `tiles` shows the attention tiles that a method computes.
"""
