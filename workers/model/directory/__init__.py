"""Reads and checks a model's directory, without torch, because the front door reads it too.

Begin at `store.py` (name to directory) and `model_config.py` (the decoder's shape). `headers.py` checks
weights, `digest.py` identifies the model.
"""
