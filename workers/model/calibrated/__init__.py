"""A model's profile, made by `workers/calibration`. It does not import torch."""
