"""A model's profile: calibrated values that `workers/calibration` has made. It imports no torch."""
