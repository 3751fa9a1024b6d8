"""A model's directory, read and checked without torch, because the front door reads it too.

Begin at `store` (name to directory) and `model_config` (the decoder's shape). `headers` checks weights,
`digest` identifies the model.
"""
