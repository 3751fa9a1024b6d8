"""What is measured of a model once, on texts: thresholds of selection rules for each head, and Δ-layers."""
