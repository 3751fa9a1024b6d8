"""The processes that compute: prefill groups, decode workers, and a model's calibration."""
