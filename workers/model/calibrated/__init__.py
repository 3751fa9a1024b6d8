"""A model's profile, without torch: `workers/calibration` makes it.

`profile.py` is the file and its checks. `levels.py` chooses a request's thresholds.
"""
