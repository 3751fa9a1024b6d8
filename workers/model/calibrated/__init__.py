"""What was calibrated for a model, free of torch.

`profile.py` is the file and its checks. `levels.py` chooses a request's thresholds from it.
`workers/calibration` makes it.
"""
