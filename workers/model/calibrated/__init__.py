"""A model's profile, which `workers/calibration` makes, and a request's thresholds from it. Free of torch."""
