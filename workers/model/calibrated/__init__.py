"""A model's profile, which `workers/calibration` makes. Free of torch."""
