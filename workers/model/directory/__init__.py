"""A model's directory, read and checked without torch, because the front door reads it too. Begin at `store`
and `model_config`."""
