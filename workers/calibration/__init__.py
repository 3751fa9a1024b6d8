"""What is measured of a model once, on texts: amounts of the selection rules for each head, and Δ-layers."""
